"""What is known of one blob, and its 41 bytes: in them the index keeps it on disk and the daemon in memory."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from cacheloader_daemon.store.names import BlobName

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_NAME = struct.Struct("<qIqI")
_STATE = struct.Struct("<qq?")
_ROW = struct.Struct("<qIqIqq?")
_SIZES = struct.Struct("<q4xq")

NAME_BYTES = _NAME.size
ROW_BYTES = _ROW.size
"""A row is the name without the key, then the rest: rows of one name begin alike."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one blob.

    Attributes:
        name: Its files.
        used_bytes: What they take on disk, at most.
        accessed_ns: When it was used last, a time stamp that never goes back; 0 if that is not known.
        suspect: Whether it may have to be verified before it is used.
    """

    name: BlobName
    used_bytes: int
    accessed_ns: int
    suspect: bool = False

    def pack(self) -> bytes:
        """``ROW_BYTES`` bytes, without the key."""
        return pack_fields(self.name) + pack_state(
            used_bytes=self.used_bytes, accessed_ns=self.accessed_ns, suspect=self.suspect
        )


def pack_name(size_bytes: int, crc32c: int, index_bytes: int, index_crc32c: int) -> bytes:
    """The ``NAME_BYTES`` bytes with which a row begins."""
    return _NAME.pack(size_bytes, crc32c, index_bytes, index_crc32c)


def pack_fields(name: BlobName) -> bytes:
    """The same, of a name."""
    return _NAME.pack(name.size_bytes, name.crc32c, name.index_bytes, name.index_crc32c)


def unpack_name(key: bytes, packed: bytes) -> BlobName:
    """The name of a row."""
    size_bytes, crc32c, index_bytes, index_crc32c = _NAME.unpack_from(packed)
    return BlobName(key=key, size_bytes=size_bytes, crc32c=crc32c, index_bytes=index_bytes, index_crc32c=index_crc32c)


def sizes_of(packed: bytes) -> tuple[int, int]:
    """Lengths of a row's shard and of its sample index."""
    return _SIZES.unpack_from(packed)


def pack_state(*, used_bytes: int, accessed_ns: int, suspect: bool) -> bytes:
    """The bytes with which a row ends."""
    return _STATE.pack(used_bytes, accessed_ns, suspect)


def unpack_state(packed: bytes) -> tuple[int, int, bool]:
    """Used bytes, time of the last use, and suspicion of a row."""
    return _STATE.unpack_from(packed, NAME_BYTES)


def unpack_many(rows: Iterable[bytes]) -> Iterator[tuple[int, int, int, int, int, int, bool]]:
    """Of each row: shard length and checksum, index length and checksum, used bytes, last use, suspicion."""
    return _ROW.iter_unpack(b"".join(rows))


def unpack_row(key: bytes, packed: bytes) -> Row:
    """The inverse of ``Row.pack``."""
    used_bytes, accessed_ns, suspect = unpack_state(packed)
    return Row(name=unpack_name(key, packed), used_bytes=used_bytes, accessed_ns=accessed_ns, suspect=suspect)
