"""Where the shared helper process listens: for processes of its own user alone, until nobody has come for a while.

Source: unix(7).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from typing import TYPE_CHECKING

from cacheloader import fdpass

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

_BACKLOG = 512  # a node starts all its ranks and workers at once
_RETRY_ACCEPT_S = 0.5
_FIRST_S = 60.0
"""Who had the helper started is on its way, however busy the node is."""

_log = logging.getLogger(__name__)


class Door:
    """Accepts connections.

    Args:
        path: Where to listen; the caller holds the lock under which such sockets are made. A socket there is stale.
        converse: Serves one connection to its end, and owns it.
        idle_s: Time without a connection after which nobody is accepted any more; the first may take longer to come.
    """

    def __init__(self, path: Path, *, converse: Callable[[socket.socket], Awaitable[None]], idle_s: float) -> None:
        self._path = path
        self._converse = converse
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()
        self._sock = _listening(path)
        self._inode = path.lstat().st_ino
        self._is_open = True
        self._was_found = False
        self._leaving: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._sock.fileno(), self._accept)
        self._note_occupancy()

    async def closed(self) -> None:
        """Return when nobody has been there for ``idle_s``."""
        await self._closed.wait()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM} and self._is_open:
                    self._loop.remove_reader(self._sock.fileno())
                    self._loop.call_later(_RETRY_ACCEPT_S, self._accept_again)
                _log.warning("cannot accept a connection: %s", error)
                return
            uid = fdpass.peer_credentials(sock).uid
            if uid != os.geteuid():
                _log.warning("turned a process of user %d away", uid)
                sock.close()
                continue
            task = self._loop.create_task(self._serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            self._was_found = True
            self._note_occupancy()

    def _accept_again(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    async def _serve(self, sock: socket.socket) -> None:
        await self._converse(sock)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a conversation met a defect", exc_info=task.exception())
        self._note_occupancy()

    def _note_occupancy(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if self._tasks:
            return
        if self._is_open:
            wait_s = self._idle_s if self._was_found else max(self._idle_s, _FIRST_S)
            self._leaving = self._loop.call_later(wait_s, self._leave)
        else:
            self._closed.set()

    def _leave(self) -> None:
        """Close the door: nobody finds it any more, and who has come meanwhile is still served."""
        self._is_open = False
        with contextlib.suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()
        self._accept()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._note_occupancy()


def _listening(path: Path) -> socket.socket:
    """A socket that listens at ``path``, however long that is."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Bound with no permissions at all and opened up afterwards: there is no moment at which others may connect.
        before = os.umask(0o777)
        try:
            sock.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.umask(before)
        path.chmod(0o600)
        sock.listen(_BACKLOG)
        sock.settimeout(0.0)
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(folder)
    return sock
