"""Names of the files of a blob. They say everything about it, so that a directory listing is an index."""

from __future__ import annotations

import re
import secrets
from typing import Self

import msgspec

DATA_SUFFIX = ".data"
INDEX_SUFFIX = ".index"

# A number with leading zeros would be another name for the same blob.
_STEM = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]{0,17})-([0-9a-f]{8})-(0|[1-9][0-9]{0,17})-([0-9a-f]{8})")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{16}\.new")
_FOLDER = re.compile(r"[0-9a-f]{2}")


class BlobName(msgspec.Struct, frozen=True, kw_only=True):
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
        return self._stem + DATA_SUFFIX

    @property
    def index(self) -> str:
        """Name of the sample index's file."""
        return self._stem + INDEX_SUFFIX

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
        is_data = name.endswith(DATA_SUFFIX)
        if not is_data and not name.endswith(INDEX_SUFFIX):
            return None
        found = parse_stem(name.removesuffix(DATA_SUFFIX if is_data else INDEX_SUFFIX), folder=folder)
        if found is None:
            return None
        key, size_bytes, crc32c, index_bytes, index_crc32c = found
        blob = cls(key=key, size_bytes=size_bytes, crc32c=crc32c, index_bytes=index_bytes, index_crc32c=index_crc32c)
        return blob, is_data


def parse_stem(stem: str, *, folder: str) -> tuple[bytes, int, int, int, int] | None:
    """The fields of ``BlobName`` from what both names of a blob begin with; ``None`` if it is no such text.

    Args:
        stem: Name of either file without its suffix.
        folder: Name of the directory it lies in.
    """
    match = _STEM.fullmatch(stem)
    if match is None or not stem.startswith(folder):
        return None
    key, size_bytes, crc32c, index_bytes, index_crc32c = match.groups()
    return bytes.fromhex(key), int(size_bytes), int(crc32c, 16), int(index_bytes), int(index_crc32c, 16)


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
