"""Blocks of shared memory in which batches travel from workers to the training process.

The training process makes a few blocks for each worker, as memory files: forked workers inherit them, spawned ones open
them through /proc, they need no room in /dev/shm, and nothing is left behind when every process is killed. A worker
fills a block that is free; the training process frees it when nothing that it delivered lies in it any more. A worker
that finds no free block does without: what the training loop keeps bounds the memory, and never stops the worker.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import WeakValueDictionary

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LARGEST_BYTES = 1 << 30
_STEP_BYTES = 1 << 20
_IDENTITY_BYTES = 16
_PAGES = mmap.MAP_SHARED | mmap.MAP_POPULATE


class Blocks:
    """The blocks of one loader's workers, as the training process and each worker see them.

    Args:
        num_workers: Workers.
        per_worker: Blocks of each.
    """

    _made: ClassVar[WeakValueDictionary[bytes, Blocks]] = WeakValueDictionary()

    def __init__(self, *, num_workers: int, per_worker: int) -> None:
        self._per_worker = per_worker
        self._pid = os.getpid()
        self.identity = os.urandom(_IDENTITY_BYTES)
        self._fds = [os.memfd_create("cacheloader-batch", os.MFD_CLOEXEC) for _ in range(num_workers * per_worker)]
        self._control_fd = os.memfd_create("cacheloader-blocks", os.MFD_CLOEXEC)
        os.ftruncate(self._control_fd, _IDENTITY_BYTES + len(self._fds))
        os.pwrite(self._control_fd, self.identity, 0)
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._used = self._map_control()
        self._made[self.identity] = self

    @classmethod
    def named(cls, identity: bytes) -> Blocks | None:
        """Those that this process has made under an identity, if they are still there."""
        return cls._made.get(identity)

    def take(self, worker: int) -> Block | None:
        """A free block of a worker, empty; ``None`` if there is none."""
        first = worker * self._per_worker
        for number in range(first, first + self._per_worker):
            if number < len(self._fds) and not self._used[number]:
                self._used[number] = 1
                return Block(blocks=self, number=number)
        return None

    def free(self, number: int) -> None:
        """Nobody needs what is in a block any more."""
        self._used[number] = 0

    def mapped(self, number: int, size_bytes: int) -> NDArray[np.uint8]:
        """At least the first ``size_bytes`` bytes of a block that is this large."""
        present = self._maps.get(number)
        if present is None or len(present) < size_bytes:
            fd = self._fds[number]
            present = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, flags=_PAGES), dtype=np.uint8)
            self._maps[number] = present
        return present

    def grown(self, number: int, size_bytes: int) -> NDArray[np.uint8] | None:
        """The same in the worker that fills it; ``None`` where there is no memory for so much."""
        present = self._maps.get(number)
        if present is None or len(present) < size_bytes:
            if size_bytes > _LARGEST_BYTES:
                return None
            # Most batches are all of one size; only where one was larger than the last there will be larger ones yet.
            wanted = size_bytes if present is None else size_bytes * 5 // 4
            room = -(-wanted // _STEP_BYTES) * _STEP_BYTES
            try:
                os.posix_fallocate(self._fds[number], 0, room)
            except OSError:
                return None
        return self.mapped(number, size_bytes)

    def _map_control(self) -> NDArray[np.uint8]:
        size_bytes = _IDENTITY_BYTES + len(self._fds)
        return np.frombuffer(mmap.mmap(self._control_fd, size_bytes), dtype=np.uint8)[_IDENTITY_BYTES:]

    def __getstate__(self) -> dict[str, Any]:
        return {
            "pid": self._pid,
            "fds": self._fds,
            "control_fd": self._control_fd,
            "identity": self.identity,
            "per_worker": self._per_worker,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._per_worker = state["per_worker"]
        self._pid = state["pid"]
        self.identity = state["identity"]
        self._maps = {}
        self._fds = []
        self._control_fd = -1
        # Where /proc does not show them, there are no blocks, and batches travel as torch sends them.
        with suppress(OSError):
            self._control_fd = self._opened(state["control_fd"])
            if os.pread(self._control_fd, _IDENTITY_BYTES, 0) == self.identity:
                for fd in state["fds"]:
                    self._fds.append(self._opened(fd))
                self._used = self._map_control()
                return
        self._close()

    def _opened(self, fd: int) -> int:
        return os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

    def _close(self) -> None:
        fds, self._fds = [*self._fds, self._control_fd], []
        self._control_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            self._close()


@dataclass(slots=True, kw_only=True)
class Block:
    """A block that a worker fills.

    Attributes:
        blocks: Where it belongs.
        number: Which one it is.
        size_bytes: Bytes that are taken.
    """

    blocks: Blocks
    number: int
    size_bytes: int = 0

    def reserve(self, size_bytes: int) -> NDArray[np.uint8] | None:
        """Its memory, at least so large; ``None`` where there is no memory for so much."""
        self.size_bytes = size_bytes
        return self.blocks.grown(self.number, size_bytes)

    def give_back(self) -> None:
        """It is not sent."""
        self.blocks.free(self.number)


class Held:
    """Memory of a block in the training process, which is free again when this and all views of it are gone.

    Args:
        blocks: Where it belongs.
        number: Which one.
        size_bytes: How much of it is in use.
    """

    def __init__(self, blocks: Blocks, number: int, size_bytes: int) -> None:
        self._memory = blocks.mapped(number, size_bytes)
        self._blocks = blocks
        self._number = number
        self._pid = os.getpid()
        # numpy keeps whoever has this interface alive for as long as there is a view of it.
        self.__array_interface__ = {**self._memory[:size_bytes].__array_interface__}

    @classmethod
    def of(cls, identity: bytes, number: int, size_bytes: int) -> Self | None:
        """What arrived from a worker; ``None`` if its blocks are gone."""
        blocks = Blocks.named(identity)
        return None if blocks is None else cls(blocks, number, size_bytes)

    def array(self) -> NDArray[np.uint8]:
        """The bytes."""
        return np.asarray(self)

    def __del__(self) -> None:
        # In a forked child this is a copy, and the block the parent's.
        if hasattr(self, "_pid") and self._pid == os.getpid():
            self._blocks.free(self._number)
