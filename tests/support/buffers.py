"""A shard that lies in memory, as formats see it."""

from __future__ import annotations

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
