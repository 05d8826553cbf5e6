"""The formats there are, by name and by file name ending."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cacheloader.errors import ConfigError
from cacheloader.formats.webdataset import WebDatasetFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheloader.formats.base import ShardFormat

FORMATS: tuple[ShardFormat, ...] = (WebDatasetFormat(),)

_COMPRESSED_SUFFIXES = (
    ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.zstd", ".tar.lz4", ".tar.z",
)  # fmt: skip


def named(name: str) -> ShardFormat:
    """The format that users call ``name``.

    Raises:
        ConfigError: There is none; the text lists those there are.
    """
    for shard_format in FORMATS:
        if shard_format.name == name:
            return shard_format
    raise ConfigError(f"format={name!r} is not known; known formats are {_known()}")


def detect(uri: str) -> ShardFormat:
    """The format of a shard by the ending of its URI.

    Raises:
        ConfigError: No format claims the ending.
    """
    shard_format = claimed_by(uri)
    if shard_format is not None:
        return shard_format
    if has_suffix(uri, _COMPRESSED_SUFFIXES):
        raise ConfigError(f"shard {uri} is compressed by its ending, which cannot be read yet; decompress it to .tar")
    raise ConfigError(f"shard {uri} has an ending that no format claims; pass format=, one of {_known()}")


def claimed_by(uri: str) -> ShardFormat | None:
    """The format that claims the ending of ``uri``, if one does; case and a query behind an HTTP path do not matter."""
    for shard_format in FORMATS:
        if has_suffix(uri, shard_format.suffixes):
            return shard_format
    return None


def has_suffix(uri: str, suffixes: Sequence[str]) -> bool:
    """Whether ``uri`` has one of these endings, judged as for ``claimed_by``."""
    return _path(uri).endswith(tuple(suffixes))


def is_file_name(uri: str) -> bool:
    """Whether ``uri`` ends as a shard does, readable or compressed, so that it cannot be meant as a directory."""
    return claimed_by(uri) is not None or has_suffix(uri, _COMPRESSED_SUFFIXES)


def all_suffixes() -> tuple[str, ...]:
    """The endings of all formats."""
    return tuple(suffix for shard_format in FORMATS for suffix in shard_format.suffixes)


def _path(uri: str) -> str:
    if uri.startswith(("http://", "https://")):
        uri = urlsplit(uri).path
    return uri.lower()


def _known() -> str:
    return ", ".join(f"{shard_format.name} ({', '.join(shard_format.suffixes)})" for shard_format in FORMATS)
