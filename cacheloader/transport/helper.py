"""Reading without a daemon through one helper process that all processes of a user on a node share.

The first that needs it starts it, under a lock; the others find its socket in a folder that is their user's alone. What
one rank or worker of a job has fetched is there for the others, and memory is that of one helper instead of one for
each. It leaves a moment after the last of them has gone. Where no such folder can be had, or the helper hangs, a
process has a helper of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import cacheloader
from cacheloader import fdpass
from cacheloader.errors import CacheloaderError, DaemonUnavailable
from cacheloader.quantity import format_size
from cacheloader.transport import direct, process
from cacheloader.transport.direct_manifests import ManifestFolder
from cacheloader.transport.endpoint import connect, takes_no_connection
from cacheloader.transport.launch_lock import take_lock
from cacheloader.transport.link import PeerSilent
from cacheloader.transport.runtime_folder import runtime_folder

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from cacheloader.config import TransportOptions
    from cacheloader.manifest.record import Manifest
    from cacheloader.protocol.messages import Welcome

IDLE_S = 10.0
"""The helper leaves when nobody was connected for so long: long enough for workers that are started anew."""

HANDED_OVER_NAME = "manifests"

_WAY_OUT = "to share one with other workers, set XDG_RUNTIME_DIR to a folder that this user can write and no other"
_CONNECT_S = 5.0
_STEERING_NAMES = ("HOME", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_STEERING_PREFIXES = ("SSL_CERT_", "FSSPEC_", "HF_")

_logger = logging.getLogger(__name__)
_started: list[process.Child] = []
"""Helpers that this process has started, to collect those that have ended."""


class SharedHelper:
    """The endpoint of the helper that the processes of this user share.

    Args:
        options: What it may hold in memory, and how long its start may take.
    """

    is_private = True
    patience_s = 3.0
    longest_pause_s = 5.0

    def __init__(self, options: TransportOptions) -> None:
        self.launch_s = options.launch_timeout_s
        self._options = options
        self._folder: Path | None = None
        self._own: direct.DirectWorker | None = None
        self._why_own = ""

    @property
    def name(self) -> str:
        """See ``Endpoint``; says why it is not shared, if it is not."""
        self._look_for_folder()
        if self._own is None:
            return "the helper process that this user's processes share"
        return f"{self._own.name} ({self._why_own})"

    @property
    def greets_late(self) -> bool:
        """See ``Endpoint``: a shared helper listens once it is ready, one of this process's own does not."""
        return self._own is not None

    def connect(self, *, deadline: float, manifest: Manifest | None) -> socket.socket:
        """A connection to the helper that runs, else to one that this call starts.

        Raises:
            PeerSilent: It takes no connection.
            DaemonUnavailable: Neither it nor one of this process's own can be started.
        """
        self._look_for_folder()
        if self._own is None:
            assert self._folder is not None
            try:
                sock = self._join(self._folder, deadline)
                if manifest is not None:
                    # A helper has no memory: without this it would list and count the whole data set again.
                    ManifestFolder(self._folder / HANDED_OVER_NAME).save(manifest)
            except PeerSilent:
                raise
            except (OSError, CacheloaderError) as error:
                said = error.message if isinstance(error, CacheloaderError) else error.strerror or str(error)
                self._read_alone(f"a shared one cannot be had: {said}", _WAY_OUT)
            else:
                return sock
        assert self._own is not None
        return self._own.connect(deadline=deadline, manifest=manifest)

    def check(self, welcome: Welcome) -> None:
        """Nothing to warn of."""

    def forsake(self) -> bool:
        """See ``Endpoint``: from now on this process has a helper of its own."""
        if self._own is not None:
            return False
        self._read_alone("the shared one hangs", "end that one")
        return True

    def close(self) -> None:
        """Collect a helper of this process's own; a shared one leaves when nobody needs it."""
        if self._own is not None:
            self._own.close()
        _collect()

    def _look_for_folder(self) -> None:
        if self._folder is None and self._own is None:
            try:
                self._folder = runtime_folder()
            except OSError as error:
                self._read_alone(f"there is no folder to share one in: {error}", _WAY_OUT)

    def _read_alone(self, why: str, way_out: str) -> None:
        self._own, self._why_own = direct.DirectWorker(self._options), why
        _logger.warning(
            "this process has a helper process and up to %s of memory for itself alone, since %s; %s",
            format_size(self._options.direct_memory_bytes),
            why,
            way_out,
        )

    def _join(self, folder: Path, deadline: float) -> socket.socket:
        _collect()
        path = folder / f"helper-{_kind(self._options)}.sock"
        sock = self._find(path)
        if sock is not None:
            return sock
        lock = take_lock(path.with_suffix(".lock"), deadline=deadline)
        try:
            return self._find(path) or self._launch(path, deadline)
        finally:
            os.close(lock)

    def _find(self, path: Path) -> socket.socket | None:
        try:
            sock = connect(path, deadline=time.monotonic() + _CONNECT_S)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except TimeoutError as error:
            raise takes_no_connection(f"the shared helper process at {path}") from error
        uid = fdpass.peer_credentials(sock).uid
        if uid != os.geteuid():
            sock.close()
            raise DaemonUnavailable(f"a process of user {uid} listens at {path}")
        return sock

    def _launch(self, path: Path, deadline: float) -> socket.socket:
        options = self._options
        log = path.with_suffix(".log")
        news, ready = os.pipe()
        try:
            try:
                arguments = ["--listen", str(path), "--ready-fd", str(ready), "--idle", str(IDLE_S)]
                arguments += ["--memory", str(options.direct_memory_bytes)]
                arguments += ["--manifest-dir", str(options.directory / direct.MANIFESTS_NAME)]
                arguments += ["--handed-over", str(path.parent / HANDED_OVER_NAME)]
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    _started.append(
                        process.start(direct.MODULE, arguments, pass_fds=[ready], output=output, own_session=True)
                    )
                finally:
                    os.close(output)
            finally:
                os.close(ready)
            is_ready = process.wait_readable(news, deadline=deadline) and os.read(news, 1)
        finally:
            os.close(news)
        sock = self._find(path) if is_ready else None
        if sock is None:
            raise DaemonUnavailable(f"it did not start; the end of {log} is:\n{process.log_tail(log)}")
        return sock


def _kind(options: TransportOptions, environment: Mapping[str, str] = os.environ) -> str:
    """What processes have in common that can share a helper: code, options, and what it would see of the node.

    The variables of the credential chains are not among that, as each client sends its own.
    """
    steering = {
        name: value
        for name, value in sorted(environment.items())
        if name in _STEERING_NAMES or name.lower().endswith("_proxy") or name.startswith(_STEERING_PREFIXES)
    }
    node = [_read("/proc/sys/kernel/random/boot_id"), *(_link(f"/proc/self/ns/{name}") for name in ("mnt", "net"))]
    code = [cacheloader.__version__, cacheloader.__file__, sys.executable]
    found = [code, node, str(options.directory), options.direct_memory_bytes, steering]
    return hashlib.blake2b(json.dumps(found).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _collect() -> None:
    _started[:] = [child for child in _started if child.exit_status() is None]
