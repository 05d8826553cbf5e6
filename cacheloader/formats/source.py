"""Byte sources over what a process already holds: a buffer, or a descriptor of a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class BufferSource:
    """A shard that lies in memory.

    Args:
        buffer: The whole shard; ``bytes`` are handed out without a copy where all of them are asked for.
    """

    __slots__ = ("_bytes",)

    def __init__(self, buffer: Buffer) -> None:
        self._bytes = buffer if isinstance(buffer, bytes) else memoryview(buffer).cast("B")

    @property
    def size_bytes(self) -> int:
        """Length of the shard."""
        return len(self._bytes)

    def read(self, start: int, stop: int) -> bytes:
        """Exactly the bytes ``[start, stop)``.

        Raises:
            OSError: The buffer ends before ``stop``.
        """
        if not 0 <= start <= stop <= len(self._bytes):
            raise OSError(f"bytes [{start}, {stop}) of a buffer of {len(self._bytes)} bytes")
        return bytes(self._bytes[start:stop])


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
