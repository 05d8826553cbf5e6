"""Where the next iteration of a data set starts, shared by the process that owns the data set and its workers.

torch's DataLoader copies a data set into its workers and never tells the copies which epoch it is. The cursor is one
page of shared memory that all copies map, so that every worker of one iteration agrees on (epoch, row) and the owner
can read it back. The page is a memory file: forked workers inherit it, spawned ones open it through /proc, and
nothing is left behind when every process is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PAGE_BYTES = 8192
_HEAD = struct.Struct("<16s6q")  # identity | next epoch, next row | epoch, row of the iteration under way | its token
_PIN = _PAGE_BYTES - 1
MAX_WORKERS = _PIN - _HEAD.size
_OWNER = -1  # no loader's seed: an iteration that the owner of the data set has opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where an iteration begins.

    Attributes:
        epoch: Epoch, from 0.
        row: First row to deliver.
    """

    epoch: int
    row: int


def next_epoch(start: Start) -> Start:
    """The start of the epoch that follows."""
    return Start(epoch=start.epoch + 1, row=0)


class SharedCursor:
    """The page. ``next`` is where the coming iteration starts, ``current`` where the one under way did."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("cacheloader-cursor", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _PAGE_BYTES)
        self._identity = os.urandom(16)
        self._map = mmap.mmap(self._fd, _PAGE_BYTES)
        self._opened = 0
        self._at_fork = (Start(epoch=0, row=0), False)
        _HEAD.pack_into(self._map, 0, self._identity, 0, 0, -1, 0, 0, 0)
        _alive.add(self)

    @property
    def next(self) -> Start:
        """Where the coming iteration starts."""
        _, epoch, row, *_ = _HEAD.unpack_from(self._map)
        return Start(epoch=epoch, row=row)

    @property
    def current(self) -> Start | None:
        """Where the iteration under way started; ``None`` before the first, and after ``move_to``."""
        _, _, _, epoch, row, *_ = _HEAD.unpack_from(self._map)
        return None if epoch < 0 else Start(epoch=epoch, row=row)

    @property
    def is_pinned(self) -> bool:
        """Whether ``next`` was moved to as a pin, and no iteration has begun since."""
        return self.current is None and bool(self._map[_PIN])

    def note_fork(self) -> None:
        """In a forked child, at once: remember where the page stood."""
        self._at_fork = (self.current or self.next, self.is_pinned)

    def after_fork(self) -> SharedCursor:
        """A page for a child that is no worker; an iteration that was under way at the fork begins there again."""
        own = SharedCursor()
        own._opened = self._opened
        own.move_to(self._at_fork[0], pin=self._at_fork[1])
        return own

    def move_to(self, start: Start, *, pin: bool = False) -> None:
        """Let the coming iteration start at ``start``.

        Args:
            start: Where.
            pin: Whether ``is_pinned`` shall say so until that iteration begins.
        """
        with self._locked():
            _HEAD.pack_into(self._map, 0, self._identity, start.epoch, start.row, -1, 0, 0, 0)
            self._map[_PIN] = pin

    def open(self, behind: Callable[[Start], Start] = next_epoch) -> int:
        """Begin an iteration at ``next`` in the process that owns the data set; returns its number.

        A loader that can tell its workers where to start uses this instead of letting them ``begin``: a worker that
        is late then joins the iteration it was made for, even if another has been opened meanwhile.

        Args:
            behind: Where to go on behind an iteration that starts at the given place.
        """
        with self._locked():
            _, epoch, row, *_ = _HEAD.unpack_from(self._map)
            after = behind(Start(epoch=epoch, row=row))
            self._opened += 1
            _HEAD.pack_into(self._map, 0, self._identity, after.epoch, after.row, epoch, row, _OWNER, self._opened)
        return self._opened

    def is_under_way(self, number: int) -> bool:
        """Whether the iteration that ``open`` gave this number is the latest, and nothing has moved since."""
        _, _, _, epoch, _, seed, iteration = _HEAD.unpack_from(self._map)
        return (seed, iteration) == (_OWNER, number) and epoch >= 0

    def begin(
        self, *, worker: int = 0, seed: int = 0, iteration: int = 0, behind: Callable[[Start], Start] = next_epoch
    ) -> Start:
        """Join the iteration that a loader has just begun, or open it.

        The first worker of an iteration opens it at ``next`` and moves ``next`` behind it; the others join it. Workers
        of one iteration show the same ``seed`` and ``iteration``; a worker that shows up twice under the same pair
        belongs to a later iteration (the user seeded torch alike).

        Args:
            worker: Worker number, 0 in the main process.
            seed: The loader's base seed, which differs from one iteration to the next.
            iteration: How often this worker process has begun before (persistent workers keep their seed).
            behind: As in ``open``.
        """
        if worker >= MAX_WORKERS:
            raise ValueError(f"worker number {worker} is above the limit of {MAX_WORKERS - 1}")
        with self._locked():
            _, next_epoch, next_row, epoch, row, seen_seed, seen_iteration = _HEAD.unpack_from(self._map)
            slot = _HEAD.size + worker
            joined = epoch >= 0 and (seen_seed, seen_iteration) == (seed, iteration) and not self._map[slot]
            if not joined:
                epoch, row = next_epoch, next_row
                self._map[_HEAD.size :] = bytes(_PAGE_BYTES - _HEAD.size)
                after = behind(Start(epoch=epoch, row=row))
                _HEAD.pack_into(self._map, 0, self._identity, after.epoch, after.row, epoch, row, seed, iteration)
            self._map[slot] = 1
        return Start(epoch=epoch, row=row)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Record locks belong to a process, so they also work between a parent and its forked children, which share
        # one open file description. The holder only copies a few bytes; a killed holder frees the lock.
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "fd": self._fd,
            "identity": self._identity,
            "next": self.next,
            "is_pinned": self.is_pinned,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["pid"] != os.getpid() and self._join(state):
            return
        # Not a worker of a living owner but a copy (copy.deepcopy, a stored data set): it starts on its own.
        self.__init__()  # type: ignore[misc]
        self.move_to(state["next"], pin=state["is_pinned"])
        self.note_fork()

    def _join(self, state: dict[str, Any]) -> bool:
        with suppress(OSError):
            fd = os.open(f"/proc/{state['pid']}/fd/{state['fd']}", os.O_RDWR | os.O_CLOEXEC)
            if os.pread(fd, 16, 0) == state["identity"]:
                self._fd, self._identity = fd, state["identity"]
                self._map = mmap.mmap(fd, _PAGE_BYTES)
                self._opened = 0
                self.note_fork()
                _alive.add(self)
                return True
            os.close(fd)
        return False

    def __del__(self) -> None:
        with suppress(AttributeError, OSError, ValueError):
            self._map.close()
            os.close(self._fd)


_alive: WeakSet[SharedCursor] = WeakSet()


def _note_fork() -> None:
    for cursor in list(_alive):
        cursor.note_fork()


os.register_at_fork(after_in_child=_note_fork)
