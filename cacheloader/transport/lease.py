"""A lease: one shard's descriptor, read with ``pread``, and its sample index."""

from __future__ import annotations

import errno
import operator
import os
from itertools import repeat
from typing import TYPE_CHECKING

from cacheloader.transport.inheritance import close_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_RELEASED = -1


class FileLease:
    """The right to read one shard through a descriptor of its bytes.

    The descriptor stays good whatever happens to the cache or the daemon. It is closed by ``release``, when the lease
    is no longer referenced, and in a forked child at once.

    Args:
        fd: Descriptor of the shard's bytes; the lease owns it from here on.
        size_bytes: Length of the shard.
        index: The format's sample index.
        source: ``"nvme"``, ``"origin"`` or ``"memory"``.
        uri: The shard, for errors.
        on_release: Called once, at most, in the process that took the lease; it may run inside the garbage collector,
            at any point of the program, so it must only take a note.
    """

    __slots__ = ("__weakref__", "_fd", "_on_release", "index", "size_bytes", "source", "uri")

    def __init__(
        self,
        *,
        fd: int,
        size_bytes: int,
        index: bytes,
        source: str,
        uri: str,
        on_release: Callable[[], None] | None = None,
    ) -> None:
        self._fd = fd
        self._on_release = on_release
        self.size_bytes = size_bytes
        self.index = index
        self.source = source
        self.uri = uri
        close_after_fork(self)

    def read(self, start: int, stop: int) -> bytes:
        """Exactly the bytes ``[start, stop)`` of the shard.

        Raises:
            OSError: The range does not lie in the shard, the file ends early, the disk fails, or the lease is over.
        """
        if not 0 <= start <= stop <= self.size_bytes:
            raise self._error(
                errno.EINVAL, f"bytes [{start}, {stop}) do not lie in its {self.size_bytes} bytes; its index is wrong"
            )
        if self._fd == _RELEASED:
            raise self._error(
                errno.EBADF, "its lease was released, or taken before this process was forked; acquire it again"
            )
        try:
            data = os.pread(self._fd, stop - start, start)
            # The usual case is one call; the kernel gives at most 2 GiB at once, and less at the end of a cut file.
            return data if len(data) == stop - start else self._read_on(data, start, stop)
        except OSError as error:
            raise self._error(error.errno or errno.EIO, error.strerror or str(error)) from error

    def read_each(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        """``read`` of many ranges, for little more than the kernel's part of it.

        Args:
            starts: First byte of each range.
            stops: One past the last byte of each.

        Raises:
            OSError: As ``read``, for the first range that cannot be read.
        """
        fd = self._fd
        sizes = list(map(operator.sub, stops, starts))
        if fd != _RELEASED and sizes and min(sizes) >= 0 and min(starts) >= 0 and max(stops) <= self.size_bytes:
            try:
                blocks = list(map(os.pread, repeat(fd), sizes, starts))
            except OSError:
                blocks = []
            # A lease that another thread gave back meanwhile may have read what the number was given to next.
            if list(map(len, blocks)) == sizes and self._fd == fd:
                return blocks
        return list(map(self.read, starts, stops))  # which says what is wrong, or reads on

    def fileno(self) -> int:
        """The descriptor, for ``mmap``; valid until the lease is released, -1 afterwards."""
        return self._fd

    def release(self) -> None:
        """Give the shard back; calling it again does nothing."""
        on_release, self._on_release = self._on_release, None
        self.close_in_child()
        if on_release is not None:
            on_release()

    def close_in_child(self) -> None:
        """Close this process's descriptor and tell nobody."""
        fd, self._fd = self._fd, _RELEASED
        self._on_release = None
        if fd != _RELEASED:
            os.close(fd)

    def __del__(self) -> None:
        # A constructor that failed leaves no descriptor to close.
        if hasattr(self, "_fd"):
            self.release()

    def __repr__(self) -> str:
        state = "released" if self._fd == _RELEASED else f"{self.size_bytes} bytes from {self.source}"
        return f"<FileLease of {self.uri}: {state}>"

    def _read_on(self, data: bytes, start: int, stop: int) -> bytes:
        parts = [data]
        position = start + len(data)
        while position < stop and parts[-1]:
            parts.append(os.pread(self._fd, stop - position, position))
            position += len(parts[-1])
        if position < stop:
            raise OSError(errno.EIO, f"its file ends at byte {position}, bytes up to {stop} were asked for")
        return b"".join(parts)

    def _error(self, code: int, text: str) -> OSError:
        return OSError(code, f"shard {self.uri} cannot be read: {text}")
