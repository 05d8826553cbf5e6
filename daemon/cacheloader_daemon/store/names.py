"""Names of the files of a blob. They say everything about it, so that a directory listing is an index."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Self

_DATA = re.compile(r"([0-9a-f]{32})-(\d{1,18})-([0-9a-f]{8})-(\d{1,18})-([0-9a-f]{8})\.(data|index)")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{16}\.new")
_FOLDER = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobName:
    """One blob: a shard's bytes, and beside them its sample index.

    Attributes:
        key: 16 bytes; they stand for the origin, the URI, the version and the size.
        size_bytes: Length of the shard.
        crc32c: Checksum of the shard.
        index_bytes: Length of the sample index.
        index_crc32c: Checksum of the sample index.
    """

    key: bytes
    size_bytes: int
    crc32c: int
    index_bytes: int
    index_crc32c: int

    @property
    def folder(self) -> str:
        """The directory below ``blobs`` that holds both files."""
        return folder_of(self.key)

    @property
    def data(self) -> str:
        """Name of the shard's file."""
        return f"{self._stem}.data"

    @property
    def index(self) -> str:
        """Name of the sample index's file."""
        return f"{self._stem}.index"

    @property
    def _stem(self) -> str:
        return f"{self.key.hex()}-{self.size_bytes}-{self.crc32c:08x}-{self.index_bytes}-{self.index_crc32c:08x}"

    @classmethod
    def parse(cls, name: str, *, folder: str) -> tuple[Self, bool] | None:
        """The blob that a file belongs to, and whether it is the data file; ``None`` if it belongs to none.

        Args:
            name: Name of the file.
            folder: Name of the directory it lies in.
        """
        match = _DATA.fullmatch(name)
        if match is None or not name.startswith(folder):
            return None
        key, size_bytes, crc32c, index_bytes, index_crc32c, kind = match.groups()
        blob = cls(
            key=bytes.fromhex(key),
            size_bytes=int(size_bytes),
            crc32c=int(crc32c, 16),
            index_bytes=int(index_bytes),
            index_crc32c=int(index_crc32c, 16),
        )
        # A number with leading zeros would give another name back.
        return (blob, kind == "data") if name in {blob.data, blob.index} else None


def folder_of(key: bytes) -> str:
    """The directory below ``blobs`` for ``key``: 256 of them keep each short."""
    return key[:1].hex()


def is_folder(name: str) -> bool:
    """Whether ``folder_of`` gives such names."""
    return _FOLDER.fullmatch(name) is not None


def temporary_name(key: bytes) -> str:
    """A fresh name for a file that is being written."""
    return f".{key.hex()}.{secrets.token_hex(8)}.new"


def is_temporary(name: str) -> bool:
    """Whether ``temporary_name`` gives such names."""
    return _TEMPORARY.fullmatch(name) is not None
