"""What names one version of one object, and half-open byte ranges (``start`` inclusive, ``stop`` exclusive)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY_BYTES = 16


def shard_key(*, origin_id: str, uri: str, version: str, size_bytes: int) -> bytes:
    """The identity under which a node caches one version of one shard.

    Args:
        origin_id: Which store answers for ``uri`` (its endpoint); equal URIs on two endpoints are two objects.
        uri: Full URI of the object.
        version: Entity tag, generation or modification time, as the origin's ``stat`` gave it.
        size_bytes: Size of the object.

    Returns:
        16 bytes.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in (origin_id, uri, version, str(size_bytes)):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


class ByteRange(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes ``[start, stop)`` of an object.

    Attributes:
        start: First byte, 0 or more.
        stop: One past the last byte, at least ``start``.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"byte range [{self.start}, {self.stop}) is not 0 <= start <= stop")

    @property
    def size_bytes(self) -> int:
        """Number of bytes in the range."""
        return self.stop - self.start


def split_range(size_bytes: int, *, part_bytes: int) -> Iterator[ByteRange]:
    """Consecutive ranges of at most ``part_bytes`` that cover ``[0, size_bytes)``."""
    for start in range(0, size_bytes, part_bytes):
        yield ByteRange(start=start, stop=min(start + part_bytes, size_bytes))
