"""A real nginx for tests: a folder over HTTP, read only, with an access log that says what was sent of each object."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import signal
import subprocess
import time
import urllib.request
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from tests.support.parent_death import die_with_parent
from tests.support.seaweedfs import free_ports
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

_CONFIGURATION = """\
daemon off;
user {user} {group};
pid {directory}/nginx.pid;
error_log {directory}/error.log warn;
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  log_format counted '$request_method\\t$request_uri\\t$status\\t$body_bytes_sent\\t$http_range';
  access_log {directory}/access.log counted;
  default_type application/octet-stream;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  sendfile on;
  keepalive_requests 1000000;
  server {{
    listen 127.0.0.1:{port};
    root {root};
    location / {{ }}
    location = /mark {{ return 200 {token}; }}
    location /denied/ {{ return 403; }}
    location /throttled/ {{ return 429; }}
    location /broken/ {{ return 500; }}
    location /no-etag/ {{ alias {root}/; etag off; }}
    location /no-ranges/ {{ alias {root}/; max_ranges 0; }}
  }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """One line of the access log."""

    method: str
    path: str
    status: int
    body_bytes: int
    byte_range: str


class NginxServer:
    """Serves ``root`` at ``url``. Paths below `/denied/`, `/throttled/` and `/broken/` answer 403, 429 and 500; below
    `/no-etag/` and `/no-ranges/` lies the same folder without entity tags or range support.

    Works as an S3 endpoint for path-style reads too: it ignores signatures and serves `/bucket/key` from the folder.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = directory / "root"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self._token = uuid.uuid4().hex

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, timeout_s: float = 60.0) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o755)
        deadline = time.monotonic() + timeout_s
        for self.port in free_ports():
            configuration = self.directory / "nginx.conf"
            configuration.write_text(
                _CONFIGURATION.format(
                    user=_user(),
                    group=_group(),
                    directory=self.directory,
                    root=self.root,
                    port=self.port,
                    token=self._token,
                )
            )
            self._process = subprocess.Popen(
                die_with_parent([nginx_binary(), "-p", str(self.directory), "-c", str(configuration)]),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if self._became_ready(deadline):
                return

    def stop(self) -> None:
        """Stop; calling it again does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGQUIT)
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(60)

    def requests(self) -> list[LoggedRequest]:
        """Every finished request, in the order in which they ended.

        A request is logged behind its last byte. Its one process logs it before it looks at another, so that once a
        request of ours is in the log, all are that ended before.
        """
        mark = f"/mark?{uuid.uuid4().hex}"
        assert self._answer(mark) == self._token
        log = self.directory / "access.log"
        wait_until(lambda: mark in log.read_text())
        before, _, _ = log.read_text().partition(mark)
        lines = [line for line in before.splitlines()[:-1] if "\t/mark?" not in line]
        return [
            LoggedRequest(
                method=method, path=urlsplit(uri).path, status=int(status), body_bytes=int(sent), byte_range=byte_range
            )
            for method, uri, status, sent, byte_range in (line.split("\t") for line in lines)
        ]

    def forget_requests(self) -> None:
        """Empty the access log."""
        (self.directory / "access.log").write_bytes(b"")

    def body_bytes(self) -> Counter[str]:
        """Bytes of successful GET bodies by decoded path."""
        counter: Counter[str] = Counter()
        for request in self.requests():
            if request.method == "GET" and request.status in {200, 206}:
                counter[unquote(request.path)] += request.body_bytes
        return counter

    def _became_ready(self, deadline: float) -> bool:
        assert self._process is not None
        while self._process.poll() is None:
            with contextlib.suppress(OSError):  # nobody is there yet, or somebody else, who took the port
                if self._answer("/mark") == self._token:
                    return True
            if time.monotonic() > deadline:
                self.stop()
                raise TimeoutError(f"nginx is not ready; see {self.directory}/error.log")
            time.sleep(0.02)
        return False

    def _answer(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            body: bytes = answer.read()
        return body.decode()


def _user() -> str:
    # Started as root, nginx would read as `nobody`, who may not enter a temporary directory.
    return pwd.getpwuid(os.geteuid()).pw_name


def _group() -> str:
    return grp.getgrgid(os.getegid()).gr_name


def nginx_binary() -> str:
    """Path of nginx.

    Raises:
        FileNotFoundError: It is not installed.
    """
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise FileNotFoundError("no nginx; install the system package nginx-light")
    return found
