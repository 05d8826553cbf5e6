"""The byte source over a file that a process has open."""

from __future__ import annotations

import os


class FileSource:
    """A shard in an open file, which stays the caller's to close.

    Args:
        descriptor: Readable and seekable; its position is neither used nor moved.
        size_bytes: Length of the shard, the file's own if not given.
    """

    __slots__ = ("_descriptor", "_size_bytes")

    def __init__(self, descriptor: int, *, size_bytes: int | None = None) -> None:
        self._descriptor = descriptor
        self._size_bytes = os.fstat(descriptor).st_size if size_bytes is None else size_bytes

    @property
    def size_bytes(self) -> int:
        """Length of the shard."""
        return self._size_bytes

    def read(self, start: int, stop: int) -> bytes:
        """Exactly the bytes ``[start, stop)``.

        Raises:
            OSError: The disk failed, or the file ends before ``stop``.
        """
        block = os.pread(self._descriptor, stop - start, start)
        if len(block) == stop - start:
            return block
        blocks = [block]  # Linux caps one read at 2 GiB, and a signal may cut it short
        position = start + len(block)
        while block and position < stop:
            block = os.pread(self._descriptor, stop - position, position)
            blocks.append(block)
            position += len(block)
        if position != stop:
            raise OSError(f"the file ends at byte {position} and bytes [{start}, {stop}) were asked for")
        return b"".join(blocks)
