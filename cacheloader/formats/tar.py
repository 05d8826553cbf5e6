"""The members of a tar archive: ustar, v7, GNU long names and large sizes, PAX.

Where ``tarfile`` stops in silence at a header that it cannot read, this walk raises: what lies behind would be lost.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, NoReturn

from cacheloader.errors import CorruptShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheloader.formats.base import ByteSource

BLOCK_BYTES = 512
_LEAST_READ_BYTES = 1 << 12
_MOST_READ_BYTES = 1 << 20
_MAX_EXTENDED_BYTES = 1 << 20
"""Longest name or PAX header believed; the longest path Linux knows is 4 KiB."""

_ZEROS = bytes(BLOCK_BYTES)
_POSIX_MAGIC = b"ustar\0"
_REGULAR = frozenset((b"0", b"\0", b"7"))
_WITHOUT_DATA = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))
_EXTENDED = frozenset((b"L", b"K", b"x", b"X", b"g"))
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_NO_MEMBER = "an extended header stands there and no member behind it"
_PAX_RECORD = re.compile(rb"(\d{1,9}) ([^=\n]+)=")


def walk_members(data: ByteSource, *, uri: str) -> Iterator[tuple[bytes, int, int]]:
    """Every regular file of the archive, in order.

    Args:
        data: The archive.
        uri: Named in errors.

    Yields:
        Name as it stands in the archive, first byte of the content, one past its last byte.

    Raises:
        CorruptShard: A header is damaged or of a kind that cannot be read, or the archive ends inside a member.
    """
    return _Walk(data, uri).members()


class _Walk:
    """One pass over an archive, with the buffer and the extended headers that it carries along."""

    def __init__(self, data: ByteSource, uri: str) -> None:
        self._data = data
        self._uri = uri
        self._size_bytes = data.size_bytes
        self._buffer = b""
        self._buffer_start = 0
        self._read_bytes = _LEAST_READ_BYTES
        self._defaults: dict[bytes, bytes] = {}  # from global PAX headers
        self._pending: dict[bytes, bytes] = {}  # for the next member alone
        self._pending_at = -1

    def members(self) -> Iterator[tuple[bytes, int, int]]:
        position = 0
        while position < self._size_bytes:
            header = self._bytes(position, position + BLOCK_BYTES, "a header")
            if header == _ZEROS:
                break
            self._check(header, position)
            kind = header[156:157]
            size = self._number(header[124:136], position)
            if kind in _EXTENDED:
                position = self._extend(kind, position, size)
                continue
            name = header[:100].partition(b"\0")[0]
            if header[345] and header[257:263] == _POSIX_MAGIC:
                name = header[345:500].partition(b"\0")[0] + b"/" + name
            old_directory = kind == b"\0" and name.endswith(b"/")
            if self._pending or self._defaults:
                name, size = self._overridden(name, size, position)
            position += BLOCK_BYTES
            if kind in _WITHOUT_DATA or old_directory:
                continue
            start, stop = position, position + size
            position = _padded(stop)
            if position > self._size_bytes:
                self._cut_off(f"member {name.decode(errors='replace')!r}", start, position)
            if kind in _REGULAR:
                yield name, start, stop
            elif kind == b"S":
                self._damaged(start, "it holds a sparse file, which cannot be read; pack it without --sparse")
            # Volume labels, dump directories and whatever else have content that is no file: passed over.
        else:
            if not position:
                self._damaged(0, "it is empty")
            if self._pending_at >= 0:
                self._damaged(self._pending_at, _NO_MEMBER)
            # tarfile and webdataset read such an archive in silence, and a shard cut off there loses its last samples.
            self._damaged(
                position,
                "it ends there without an end-of-archive block, as if it were cut off between two members; copy it "
                "again or pack it anew, or append 1,024 zero bytes if it is whole",
            )
        if self._pending_at >= 0:
            self._damaged(self._pending_at, _NO_MEMBER)

    def _bytes(self, start: int, stop: int, what: str) -> bytes:
        if stop - self._buffer_start > len(self._buffer):
            if stop > self._size_bytes:
                self._cut_off(what, start, stop)
            self._read_bytes = self._next_read_bytes(start)
            self._buffer = self._data.read(start, min(max(stop, start + self._read_bytes), self._size_bytes))
            self._buffer_start = start
        return self._buffer[start - self._buffer_start : stop - self._buffer_start]

    def _next_read_bytes(self, start: int) -> int:
        """More at once while members are small; where they are large, their content is not read to find the next."""
        skipped_bytes = start - self._buffer_start - len(self._buffer)
        if skipped_bytes < self._read_bytes:
            return min(4 * self._read_bytes, _MOST_READ_BYTES)
        return _LEAST_READ_BYTES

    def _check(self, header: bytes, position: int) -> None:
        field = header[148:156]
        stored = self._number(field, position)
        # The lower half of Adler-32 is 1 plus the sum of all bytes modulo 65521, twenty times as fast as sum(header).
        if zlib.adler32(header) & 0xFFFF != (1 + stored - 8 * ord(" ") + sum(field)) % 65521:
            signed = sum(memoryview(header).cast("b")) - sum(memoryview(field).cast("b")) + 8 * ord(" ")
            if stored != signed:  # as some historic tars counted
                self._damaged(position, f"a tar header should be there, and its checksum {stored} is wrong")

    def _number(self, field: bytes, position: int) -> int:
        if field[0] == 0x80:  # base 256, for what octal digits cannot hold
            return int.from_bytes(field[1:], "big")
        digits = field.partition(b"\0")[0].strip()
        if not digits:
            return 0
        if not digits.isdigit():
            self._damaged(position, f"a tar header should be there, and {field!r} is no number")
        try:
            return int(digits, 8)
        except ValueError:
            self._damaged(position, f"a tar header should be there, and {field!r} is no octal number")

    def _extend(self, kind: bytes, position: int, size: int) -> int:
        """Keep what an extended header says, and return where the next header stands."""
        start, stop = position + BLOCK_BYTES, position + BLOCK_BYTES + size
        if size > _MAX_EXTENDED_BYTES:
            self._damaged(position, f"an extended header of {size} bytes is longer than {_MAX_EXTENDED_BYTES}")
        block = self._bytes(start, stop, "an extended header")
        if kind == b"g":
            self._defaults |= self._pax_records(block, start)
            return _padded(stop)
        # Of several headers before one member the first wins, as in tarfile.
        if kind == b"L":
            self._pending.setdefault(b"path", block.partition(b"\0")[0])
        elif kind != b"K":
            self._pending = self._pax_records(block, start) | self._pending
        if self._pending_at < 0:
            self._pending_at = position
        return _padded(stop)

    def _pax_records(self, block: bytes, start: int) -> dict[bytes, bytes]:
        records: dict[bytes, bytes] = {}
        position = 0
        while position < len(block):
            match = _PAX_RECORD.match(block, position)
            stop = position + int(match[1]) if match else 0
            if match is None or not match.end() < stop <= len(block) or block[stop - 1 : stop] != b"\n":
                self._damaged(start + position, "a PAX record should be there and is malformed")
            records[match[2]] = block[match.end() : stop - 1]
            position = stop
        if b"path" in records:
            records[b"path"] = records[b"path"].rstrip(b"/")
        return records

    def _overridden(self, name: bytes, size: int, position: int) -> tuple[bytes, int]:
        records = self._defaults | self._pending
        self._pending, self._pending_at = {}, -1
        if any(keyword.startswith(b"GNU.sparse.") for keyword in records):
            self._damaged(position, "it holds a sparse file, which cannot be read; pack it without --sparse")
        if b"size" in records:
            if not records[b"size"].isdigit():
                self._damaged(
                    position, f"the PAX header before gives the size {records[b'size']!r}, which is no number"
                )
            size = int(records[b"size"])
        return records.get(b"path", name), size

    def _cut_off(self, what: str, start: int, stop: int) -> NoReturn:
        self._fail(
            f"is cut off at offset {start}: {what} needs bytes up to {stop} and the shard ends at {self._size_bytes}"
        )

    def _damaged(self, position: int, why: str) -> NoReturn:
        self._fail(f"cannot be read as a tar archive at offset {position}: {why}")

    def _fail(self, why: str) -> NoReturn:
        head = self._data.read(0, min(8, self._size_bytes))
        for magic, compression in _COMPRESSED.items():
            if head.startswith(magic):
                why = f"is no tar archive but compressed with {compression}: decompress it"
        raise CorruptShard(f"shard {self._uri} {why}; replace the shard or leave it out", uri=self._uri)


def _padded(stop: int) -> int:
    return stop + -stop % BLOCK_BYTES
