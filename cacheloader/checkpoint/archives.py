"""Files that carry their own proof: torch's zip archives hold a checksum of each record, safetensors their length."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import IO, Any

MAX_HEADER_BYTES = 100 * 2**20
"""What the safetensors library itself accepts as a header."""


class Slice(io.RawIOBase):
    """Part of a seekable stream as a stream of its own.

    Args:
        stream: The whole.
        offset: Where the part begins, in bytes.
        length: How long it is, in bytes.
    """

    def __init__(self, stream: IO[bytes], *, offset: int, length: int) -> None:
        self._stream = stream
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move inside the part."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Where in the part the next read begins."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read, up to the end of the part."""
        count = max(0, min(len(buffer), self._length - self._position))
        self._stream.seek(self._offset + self._position)
        data = self._stream.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def wrong_archive(stream: IO[bytes], *, read_bytes: bool) -> str:
    """Why a file that torch has saved cannot be whole; empty if nothing speaks against it.

    Args:
        stream: The file.
        read_bytes: Compare the checksum of every record, rather than only find the records.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            bad = archive.testzip() if read_bytes else None
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, struct.error) as error:
        return f"is torn, or no archive of torch's ({error})"
    return f"has a record with a wrong checksum ({bad})" if bad else ""


def wrong_safetensors(stream: IO[bytes], *, size_bytes: int) -> str:
    """Why a safetensors file cannot be whole. It holds no checksum: a flipped bit in a tensor is not seen."""
    start = stream.read(8)
    if len(start) < 8:
        return f"has {len(start)} bytes and no header"
    (length,) = struct.unpack("<Q", start)
    if length > min(size_bytes, MAX_HEADER_BYTES):
        return f"says that its header has {length:,} bytes, and has {size_bytes:,} itself"
    try:
        header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"has a header that cannot be read ({type(error).__name__}: {error})"
    expected = 8 + length + max(ends, default=0)
    return f"has {size_bytes:,} bytes and its header describes {expected:,}" if expected != size_bytes else ""
