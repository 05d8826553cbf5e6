"""Where a session connects to: what every kind of peer has in common, and the shared daemon of a node."""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import TYPE_CHECKING, Protocol

from cacheloader.errors import DaemonUnavailable
from cacheloader.transport.link import PeerGone, PeerSilent

if TYPE_CHECKING:
    from pathlib import Path

    from cacheloader.manifest.record import Manifest
    from cacheloader.protocol.messages import Welcome

_SUN_PATH_BYTES = 107
_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_LASTING = (errno.EACCES, errno.EPERM, errno.EPROTOTYPE, errno.ENOTDIR)


class Endpoint(Protocol):
    """One kind of peer. An instance belongs to one session."""

    @property
    def name(self) -> str:
        """Who that is, for errors and logs."""
        ...

    @property
    def is_private(self) -> bool:
        """Whether the peer works for this user alone, so that credentials from the environment may go there."""
        ...

    @property
    def launch_s(self) -> float:
        """How long one ``connect`` may take because it has to start the peer; 0 if it never does."""
        ...

    @property
    def greets_late(self) -> bool:
        """Whether ``connect`` returns before the peer has started, so that its greeting takes as long as its start."""
        ...

    @property
    def patience_s(self) -> float:
        """How long a peer that does not answer is tried again before the session reads elsewhere."""
        ...

    @property
    def longest_pause_s(self) -> float:
        """While the session reads elsewhere, the longest time between two attempts to come back."""
        ...

    def connect(self, *, deadline: float, manifest: Manifest | None) -> socket.socket:
        """A new connection, in one attempt; starts the peer if that is what it takes.

        Args:
            deadline: On the clock of ``time.monotonic``.
            manifest: The data set that will be opened, if it is known, for a peer that has no memory of its own.

        Raises:
            PeerGone: Nobody answers there; trying again may help.
            PeerSilent: Somebody listens there and takes no connection.
            DaemonError, ConfigError: It cannot be had, and trying again will not help.
        """
        ...

    def check(self, welcome: Welcome) -> None:
        """Look at what the peer said of itself, and warn of what the user would want to know."""
        ...

    def forsake(self) -> bool:
        """The peer of the last connection hangs: whether the next ``connect`` leads to another one."""
        ...

    def close(self) -> None:
        """Let go of what ``connect`` started, where it lives for this session alone."""
        ...


class SharedDaemon:
    """The daemon that an administrator runs for all jobs of a node.

    Args:
        path: Its socket.
        patience_s: How long to wait for it when it was lost.
    """

    is_private = False
    greets_late = False
    launch_s = 0.0
    longest_pause_s = 5.0

    def __init__(self, path: Path, *, patience_s: float) -> None:
        self.name = f"the daemon at unix://{path}"
        self.patience_s = patience_s
        self._path = path

    def connect(self, *, deadline: float, manifest: Manifest | None) -> socket.socket:  # noqa: ARG002
        """A new connection.

        Raises:
            PeerGone: Nobody listens there.
            PeerSilent: It takes no connection.
            DaemonUnavailable: Another program does, or not for this user.
        """
        try:
            return connect(self._path, deadline=deadline)
        except TimeoutError as error:
            raise takes_no_connection(self.name) from error
        except OSError as error:
            kind = DaemonUnavailable if error.errno in _LASTING else PeerGone
            raise kind(f"{self.name} cannot be reached: {_reason(error)}") from error

    def check(self, welcome: Welcome) -> None:
        """Nothing to warn of: its settings are its administrator's."""

    def forsake(self) -> bool:
        """There is no other."""
        return False

    def close(self) -> None:
        """Nothing to let go of."""


def connect(path: Path, *, deadline: float) -> socket.socket:
    """A connection to the SEQPACKET socket at ``path``, also where the path is longer than the kernel's limit.

    Raises:
        TimeoutError: The queue of connections stays full until the deadline.
        OSError: Nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # On a unix socket a connect that does not wait fails with EAGAIN while the queue is full, and poll cannot tell
        # when it no longer is; hence the timeout.
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        if len(os.fsencode(path)) <= _SUN_PATH_BYTES:
            _connect(sock, str(path), deadline)
        else:
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _connect(sock, f"/proc/self/fd/{folder}/{path.name}", deadline)
            finally:
                os.close(folder)
    except BaseException:
        sock.close()
        raise
    return sock


def takes_no_connection(name: str, pid: int = 0) -> PeerSilent:
    """The error for a peer that listens and whose queue of connections stays full.

    Args:
        name: Who it is.
        pid: Its process, 0 if that is unknown: only a connection tells.
    """
    way_out = f"wake it with kill -CONT {pid}, or end it with kill -9 {pid}" if pid else "ss -xlp names its process"
    who = f" (pid {pid})" if pid else ""
    return PeerSilent(
        f"{name}{who} hangs or was stopped, since it takes no connection and its queue of them is full; {way_out}"
    )


def _connect(sock: socket.socket, address: str, deadline: float) -> None:
    while True:
        try:
            sock.connect(address)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "its queue of connections is full") from error
            time.sleep(_PAUSE_S)
        else:
            return


def pause_s(attempt: int) -> float:
    """A random pause before attempt number ``attempt`` (from 0), doubling each time, so that many processes spread.

    The number comes from the operating system: nothing here may draw from, or depend on, a seeded generator.
    """
    fraction = int.from_bytes(os.urandom(2), "little") / 2**16
    return min(_PAUSE_S * (1 << min(attempt, 16)), _LONGEST_PAUSE_S) * (0.5 + fraction)


def _reason(error: OSError) -> str:
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return f"there is no such socket; start it, or {_WAY_OUT}"
        case errno.ECONNREFUSED:
            return f"nobody listens there; start it, or {_WAY_OUT}"
        case errno.EACCES | errno.EPERM:
            return f"this user may not open its socket; join the group that owns it, or {_WAY_OUT}"
        case errno.EPROTOTYPE:
            return f"another program listens there; correct the path, or {_WAY_OUT}"
        case _:
            return error.strerror or str(error)


_WAY_OUT = 'leave daemon= and CACHELOADER_DAEMON out for a private daemon, or pass daemon="none" to read without one'
