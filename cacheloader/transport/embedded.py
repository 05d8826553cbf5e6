"""The embedded default: the first process of a node that needs one starts a private daemon.

All processes that name the same cache directory meet at one daemon. They find it by its socket there; where nobody
listens, one of them holds ``launch.lock`` while it starts the daemon, and the others wait for the lock and look again.
The daemon itself holds ``daemon.lock`` for its life, so that there is never a second one, whatever clients do.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cacheloader.errors import CacheUnusable, DaemonError, DaemonUnavailable, DeadlineExceeded, from_wire
from cacheloader.quantity import format_size
from cacheloader.transport import process
from cacheloader.transport.endpoint import connect, pause_s, takes_no_connection
from cacheloader.transport.launch_lock import LONGEST_BACKOFF, take_lock
from cacheloader.transport.link import PeerGone

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

    from cacheloader.config import TransportOptions
    from cacheloader.manifest.record import Manifest
    from cacheloader.protocol.messages import Welcome

MODULE = "cacheloader_daemon"
SOCKET_NAME = "daemon.sock"
LOG_NAME = "daemon.log"
LAUNCH_LOCK_NAME = "launch.lock"
DAEMON_LOCK_NAME = "daemon.lock"

_NEWS_BYTES = 65536
_HELD_PAUSE_S = 2.0
_COLLECT_S = 10.0

_logger = logging.getLogger(__name__)
_warned: set[tuple[str, int]] = set()
_started: list[process.Child] = []
"""Daemons that this process has started, to collect those that have ended: a session ends long before its daemon."""


class _Held(DaemonUnavailable):
    """Another daemon holds the directory and does not listen: it is about to leave, or still starts."""


class PrivateDaemon:
    """The daemon of one user's cache directory, started when it is not there.

    Args:
        options: Where the cache lies, what it may hold, and how long things may take.
    """

    is_private = True
    greets_late = False
    patience_s = 10.0
    longest_pause_s = 300.0  # an attempt may cost the start of a process

    def __init__(self, options: TransportOptions) -> None:
        self.name = f"the private daemon in {options.directory}"
        self.launch_s = options.launch_timeout_s
        self._options = options

    def connect(self, *, deadline: float, manifest: Manifest | None) -> socket.socket:  # noqa: ARG002
        """A connection to the running daemon, else to one that this call starts.

        Raises:
            CacheUnusable: The cache directory cannot be made, written or used.
            PeerSilent: The daemon runs and takes no connection.
            DaemonUnavailable: The daemon did not start; the text ends with the end of its log.
            DeadlineExceeded: It did not start in time.
            ConfigError: It refuses its options.
        """
        _started[:] = [child for child in _started if child.exit_status() is None]
        sock = self._find(deadline)
        if sock is not None:
            return sock
        _make_directory(self._options.directory)
        held: _Held | None = None
        while True:
            with self._launch_lock(deadline):
                try:
                    return self._find(deadline) or self._launch(deadline)
                except _Held as error:
                    held = error
                except DeadlineExceeded as error:
                    raise held or error from error
            sock = self._watch(min(deadline, time.monotonic() + _HELD_PAUSE_S))
            if sock is not None:
                return sock
            if time.monotonic() >= deadline:
                raise held

    def check(self, welcome: Welcome) -> None:
        """Warn, once in a process, if the daemon was started with another cache size than this process asks for."""
        asked = self._options.cache_size_bytes
        key = (str(self._options.directory), asked or 0)
        if asked is not None and welcome.quota_bytes != asked and key not in _warned:
            _warned.add(key)
            _logger.warning(
                "cache_size=%s has no effect: %s (pid %d) already runs with %s; another size holds once it has left, "
                "%g s after its last client",
                format_size(asked),
                self.name,
                welcome.pid,
                format_size(welcome.quota_bytes),
                self._options.idle_timeout_s,
            )

    def forsake(self) -> bool:
        """There is no other, as long as it holds its directory."""
        return False

    def close(self) -> None:
        """Nothing to let go of: the daemon serves others too, and leaves when nobody needs it."""

    def _find(self, deadline: float) -> socket.socket | None:
        path = self._options.directory / SOCKET_NAME
        until = min(deadline, time.monotonic() + self._options.hello_timeout_s)
        try:
            return connect(path, deadline=until)
        except TimeoutError as error:
            raise takes_no_connection(self.name, _holder(self._options.directory / DAEMON_LOCK_NAME)) from error
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return None
        except PermissionError as error:
            raise CacheUnusable(
                f"{path} belongs to another user; pass cache_dir= with a directory of your own"
            ) from error
        except OSError as error:
            raise DaemonUnavailable(f"{self.name} cannot be reached: {error.strerror or error}") from error

    def _watch(self, deadline: float) -> socket.socket | None:
        """A connection to the daemon that holds the directory, if it begins to listen before the deadline."""
        attempt = 0
        while (sock := self._find(deadline)) is None and time.monotonic() < deadline:
            time.sleep(pause_s(min(attempt, LONGEST_BACKOFF)))
            attempt += 1
        return sock

    def _launch(self, deadline: float) -> socket.socket:
        options = self._options
        news, ready = os.pipe()
        try:
            try:
                child = self._start(ready)
            finally:
                os.close(ready)
            _started.append(child)
            line = self._first_line(news, deadline)
        finally:
            os.close(news)
        if line is None:
            log = options.directory / LOG_NAME
            ended = child.exit_status(timeout_s=_COLLECT_S)
            raise DaemonUnavailable(
                f"{self.name} ended with status {ended} while it started; the end of {log} is:\n{process.log_tail(log)}"
            )
        if "error" in line:
            child.exit_status(timeout_s=_COLLECT_S)
            error = from_wire(str(line["error"]), str(line.get("message", "it gave no reason")))
            raise _Held(error.message) if type(error) is DaemonUnavailable else error
        sock = self._find(deadline)
        if sock is None:
            # It has left again, and can be started again.
            raise PeerGone(f"{self.name} said it was ready and does not listen")
        return sock

    def _start(self, ready: int) -> process.Child:
        options = self._options
        arguments = ["--private", "--cache-dir", str(options.directory)]
        if options.cache_size_bytes is not None:
            arguments += ["--cache-size", str(options.cache_size_bytes)]
        arguments += ["--idle-timeout", str(options.idle_timeout_s), "--ready-fd", str(ready)]
        try:
            log = os.open(options.directory / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(options.directory, error) from error
        try:
            return process.start(MODULE, arguments, pass_fds=[ready], output=log, own_session=True)
        finally:
            os.close(log)

    def _first_line(self, news: int, deadline: float) -> dict[str, object] | None:
        """What the daemon says of its start; ``None`` if it ended without a word."""
        line = b""
        while not line.endswith(b"\n"):
            if not process.wait_readable(news, deadline=deadline):
                raise DeadlineExceeded(
                    f"{self.name} was started and is not ready yet; recovering a large cache takes its time: see "
                    f"{self._options.directory / LOG_NAME}, and raise launch_timeout_s= if it goes on well"
                )
            part = os.read(news, _NEWS_BYTES)
            if not part:
                return None
            line += part
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise DaemonUnavailable(f"{self.name} said {line[:200]!r} when it started, which is no JSON object")
        return said

    @contextmanager
    def _launch_lock(self, deadline: float) -> Iterator[None]:
        path = self._options.directory / LAUNCH_LOCK_NAME
        try:
            lock = take_lock(path, deadline=deadline)
        except OSError as error:
            raise _unusable(self._options.directory, error) from error
        try:
            yield
        finally:
            os.close(lock)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(directory, error) from error


_WAY_OUT = 'pass cache_dir= with a directory on a local disk that you may write, or daemon="none" to read without one'


def _unusable(directory: Path, error: OSError) -> DaemonError:
    return CacheUnusable(f"the cache directory {directory} cannot be used: {error.strerror}; {_WAY_OUT}")


def _holder(lock: Path) -> int:
    """The process that a daemon wrote into its lock file, 0 if that cannot be read."""
    try:
        return int(lock.read_text())
    except (OSError, ValueError):
        return 0
