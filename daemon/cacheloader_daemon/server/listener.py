"""The listening socket: where it lives, who may connect, and how many.

asyncio's own unix servers refuse SEQPACKET and cannot pass descriptors, hence a plain socket on the loop.

Source: unix(7), sd_listen_fds(3).
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from cacheloader import fdpass
from cacheloader.errors import CacheloaderError, CacheUnusable, DaemonUnavailable, ProtocolError
from cacheloader.protocol import frames

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, MutableMapping
    from pathlib import Path

    from cacheloader_daemon.memberships import Memberships

log = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 107
"""``sun_path`` holds 108 bytes with the zero at its end."""

BACKLOG = 512
"""A node starts all its ranks and workers at once: 8 ranks with 16 workers each are 136 connections."""

ACCEPTS_PER_TURN = 32
RETRY_ACCEPT_S = 0.5
"""Pause before accepting again when the process has no descriptor left for a connection."""

LINGER_S = 1.0
"""Time that a client that was turned away has to read why."""

MAX_LINGERING = 64
"""Of them at once; the oldest is closed for one more."""

_SYSTEMD_FIRST_FD = 3


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Which peers may connect.

    Attributes:
        uids: Users that may connect.
        gids: Groups whose members may connect.
        anybody: Whether whoever can open the socket may connect: its mode and its directory then decide.
    """

    uids: frozenset[int]
    gids: frozenset[int] = frozenset()
    anybody: bool = False

    def admits(self, peer: fdpass.PeerCredentials) -> bool:
        """Whether ``peer`` may connect."""
        return self.anybody or peer.uid in self.uids or bool(peer.groups & self.gids)


def bind(path: Path, *, mode: int) -> socket.socket:
    """A listening socket at ``path``; a stale socket there is replaced.

    A path too long for ``sun_path`` is bound through the descriptor of its directory.

    Args:
        path: Where clients look for it.
        mode: Its permission bits.

    Raises:
        DaemonUnavailable: Another daemon listens there.
        CacheUnusable: Something else is at ``path``, or the directory cannot be written.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    directory: int | None = None
    try:
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        short = f"/proc/self/fd/{directory}/{path.name}"
        address = str(path) if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES else short
        _make_room(path, address)
        # Bound with no permissions at all and opened up afterwards: there is no moment at which too many may connect.
        before = os.umask(0o777)
        try:
            sock.bind(address)
        finally:
            os.umask(before)
        path.chmod(mode)
        sock.listen(BACKLOG)
        sock.settimeout(0.0)
    except OSError as error:
        sock.close()
        raise CacheUnusable(f"no socket can be made at {path}: {error.strerror}", uri=str(path)) from error
    except BaseException:
        sock.close()
        raise
    finally:
        if directory is not None:
            os.close(directory)
    return sock


def _make_room(path: Path, address: str) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        what = "a directory" if stat.S_ISDIR(kind) else "a file that is no socket"
        raise CacheUnusable(f"{what} is at {path}, where the daemon's socket has to be; remove it", uri=str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(0.0)
        try:
            probe.connect(address)
        except BlockingIOError:
            pass  # its backlog is full, so somebody listens
        except OSError:
            path.unlink()
            return
    raise DaemonUnavailable(f"another daemon listens at {path}; stop it, or choose another socket", uri=str(path))


def inherited_from_systemd(environment: MutableMapping[str, str], *, pid: int) -> socket.socket | None:
    """The listening socket that systemd passed, or ``None``; the variables that say so are taken from ``environment``.

    Raises:
        DaemonUnavailable: systemd passed something other than one SEQPACKET unix socket.
    """
    listen_pid = environment.pop("LISTEN_PID", "")
    num_fds = environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if listen_pid != str(pid) or num_fds in {"", "0"}:
        return None
    sock = socket.socket(fileno=_SYSTEMD_FIRST_FD)
    if num_fds != "1" or sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
        found = f"{num_fds} sockets, the first of type {sock.type!r}"
        sock.detach()
        raise DaemonUnavailable(f"systemd passed {found}; the unit needs exactly one ListenSequentialPacket=")
    sock.set_inheritable(False)
    sock.settimeout(0.0)
    return sock


class Listener:
    """Accepts connections from admitted peers, at most ``max_connections`` at once."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        admission: Admission,
        max_connections: int,
        num_connections: Callable[[], int],
        accepted: Callable[[socket.socket], None],
        path: Path | None = None,
        memberships: Memberships | None = None,
    ) -> None:
        """Start accepting.

        Args:
            sock: A listening socket, owned from now on.
            loop: The running loop.
            admission: Who may connect.
            max_connections: More than these are told so and closed.
            num_connections: How many there are now.
            accepted: Takes the ownership of a connected socket.
            path: The socket file to remove at the end; ``None`` if somebody else owns it.
            memberships: Groups of a user beside those of his process; ``None`` if the latter count alone.
        """
        self._sock = sock
        self._loop = loop
        self._admission = admission
        self._max_connections = max_connections
        self._num_connections = num_connections
        self._accepted = accepted
        self._path = path
        self._memberships = memberships
        self._undecided: set[socket.socket] = set()
        self._inode = path.stat().st_ino if path is not None else 0
        self._retry: asyncio.TimerHandle | None = None
        self._lingering: deque[socket.socket] = deque()
        self._is_closed = False
        loop.add_reader(sock.fileno(), self._acceptable)

    def close(self) -> None:
        """Stop accepting and remove the socket file if it is still ours; calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        while self._lingering:
            self._lingering.popleft().close()
        if self._memberships is not None:
            self._memberships.close()
        while self._undecided:
            self._undecided.pop().close()
        if self._path is not None:
            try:
                if self._path.lstat().st_ino == self._inode:
                    self._path.unlink()
            except OSError as error:
                log.info("the socket file %s was gone before its daemon: %s", self._path, error)

    def _acceptable(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Source: accept(2). The first group means that one connection broke, the second that we are out of
                # descriptors or memory; the socket would stay readable and the loop would spin.
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    log.warning("cannot accept connections for now: %s", error)
                    self._loop.remove_reader(self._sock.fileno())
                    self._retry = self._loop.call_later(RETRY_ACCEPT_S, self._accept_again)
                    return
                log.info("a connection broke before it was accepted: %s", error)
                continue
            if self._memberships is None:
                self._decide(sock)
            else:
                self._undecided.add(sock)
                uid = fdpass.peer_credentials(sock).uid
                self._memberships.when_known(uid, lambda sock=sock: self._decide(sock))  # type: ignore[misc]

    def _decide(self, sock: socket.socket) -> None:
        self._undecided.discard(sock)
        if self._is_closed:
            sock.close()
            return
        refusal = self._refusal(sock)
        if refusal is None:
            self._accepted(sock)
        else:
            self._turn_away(sock, refusal)

    def _turn_away(self, sock: socket.socket, refusal: CacheloaderError) -> None:
        """Say why, and close once the client can have read it: its Hello may still be on its way."""
        log.warning("turned a client away: %s", refusal.message)
        sock.settimeout(0.0)
        _tell(sock, refusal)
        if len(self._lingering) >= MAX_LINGERING:
            self._lingering.popleft().close()
        self._lingering.append(sock)
        self._loop.call_later(LINGER_S, sock.close)

    def _accept_again(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._acceptable)

    def _refusal(self, sock: socket.socket) -> CacheloaderError | None:
        peer = fdpass.peer_credentials(sock)
        if self._memberships is not None:
            peer = self._memberships.completed(peer)
        if not self._admission.admits(peer):
            return DaemonUnavailable(f"user {peer.uid} may not use this daemon; its configuration lists who may")
        if self._num_connections() + len(self._undecided) >= self._max_connections:
            limit = f"max_connections={self._max_connections}"
            return DaemonUnavailable(f"the daemon serves as many connections as it may ({limit}); raise the limit")
        return None


def _tell(sock: socket.socket, refusal: CacheloaderError) -> None:
    try:
        # The Hello is read first: closing with an unread message would reset the connection, and the reset would reach
        # the client ahead of the reason.
        _drop_one(sock)
        fdpass.send(sock, frames.encode(frames.failed(0, refusal)))
        sock.shutdown(socket.SHUT_WR)
    except OSError as error:
        log.info("a client that was turned away did not listen: %s", error)


def _drop_one(sock: socket.socket) -> None:
    try:
        received = fdpass.receive(sock)
    except (BlockingIOError, ProtocolError):
        return
    if received.fd is not None:
        os.close(received.fd)
