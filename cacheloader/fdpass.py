"""One datagram with at most one file descriptor, over a SEQPACKET unix socket; and sealed memory files.

SEQPACKET keeps a message and its descriptor together, so there is no framing to get wrong. Python's own
``socket.send_fds`` and ``recv_fds`` ignore their flags (cpython #107898), which would leave received descriptors
inheritable; hence ``sendmsg`` and ``recvmsg`` here, with ``MSG_CMSG_CLOEXEC`` and a check of ``MSG_CTRUNC``.

Source: unix(7), recvmsg(2), memfd_create(2), socket(7).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
from typing import TYPE_CHECKING

import msgspec

from cacheloader.errors import ProtocolError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_MESSAGE_BYTES = 65536
"""Above this a sender passes a memory file instead; the kernel's default socket buffer holds three such messages."""

_FD_BYTES = array.array("i").itemsize
_UCRED = struct.Struct("3i")
_SO_PEERGROUPS = 59  # on x86, ARM and POWER; Python has no name for it
_MAX_OPTION_BYTES = 1024
"""What Python reads of a socket option at most: 256 groups."""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """One datagram.

    Attributes:
        data: The message; empty means that the peer closed the connection.
        fd: The descriptor that came with it, owned by the receiver; ``None`` if there was none.
    """

    data: bytes
    fd: int | None


class PeerCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """Who was at the other end when the connection was made, as the kernel saw it.

    Attributes:
        pid: Process.
        uid: User.
        gid: Main group.
        groups: All groups, the main one among them.
    """

    pid: int
    uid: int
    gid: int
    groups: frozenset[int]


def send(sock: socket.socket, data: bytes, fd: int | None = None) -> None:
    """Send one message, and with it a duplicate of ``fd``; the caller keeps ``fd`` and may close it afterwards."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is above the limit of {MAX_MESSAGE_BYTES} bytes")
    ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> Received:
    """Receive one message.

    Raises:
        ProtocolError: The message was cut, or carried more than one descriptor (all are closed).
        BlockingIOError: The socket does not block and holds no message.
        TimeoutError: The socket has a timeout, and it passed.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        MAX_MESSAGE_BYTES, socket.CMSG_SPACE(2 * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) > 1:
        for fd in fds:
            os.close(fd)
        raise ProtocolError(f"a message was cut or carried {len(fds)} descriptors; at most one is allowed")
    return Received(data=data, fd=fds[0] if fds else None)


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Process, user and groups of the peer (``SO_PEERCRED``, ``SO_PEERGROUPS``)."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    groups = array.array("I")
    # Refused by Linux before 4.13, and of a peer in more groups than Python can read: its main group alone counts then.
    with contextlib.suppress(OSError):
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_OPTION_BYTES))
    return PeerCredentials(pid=pid, uid=uid, gid=gid, groups=frozenset({gid, *groups}))


def sealed_memory_file(name: str, content: Buffer) -> int:
    """A descriptor of a memory file that holds ``content`` and can no longer change or shrink; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write_whole(fd, content, offset=0)
        seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_whole(fd: int, content: Buffer, *, offset: int) -> None:
    """Write all of ``content`` to the file ``fd`` from byte ``offset`` on; one call of the kernel may write a part."""
    view = memoryview(content).cast("B")
    while len(view):
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]


def seal(fd: int) -> None:
    """Forbid every later write to the memory file ``fd``, so that a reader that maps it can never be hurt."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)


def is_sealed(fd: int) -> bool:
    """Whether ``fd`` is a memory file that can neither shrink nor be written."""
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed == needed
    except OSError:
        return False
