"""The manifest as one flat block of bytes: mapped, not parsed, so that a million shards cost a process nothing.

Layout, little endian::

    magic 8 bytes | header length uint64 | header JSON, padded to 8
    size_bytes int64 [n] | num_samples int64 [n] | uri_stop int64 [n] | version_stop int64 [n]
    all URIs, one behind the other, UTF-8 | all versions, likewise

The digest is that of the whole block.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from cacheloader.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from typing_extensions import Buffer

MAGIC = b"CLMANIF1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One shard.

    Attributes:
        uri: Full URI.
        size_bytes: Length of the object.
        version: Entity tag, generation or modification time; "" where the store gives none.
        num_samples: Samples it holds.
    """

    uri: str
    size_bytes: int
    version: str
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """An immutable list of shards in the order that the user named them.

    Attributes:
        format: Name of the shards' format.
        origin_id: The store that the shards come from.
        size_bytes: int64 [num_shards].
        num_samples: int64 [num_shards].
        digest: 32 hexadecimal digits that name this manifest.
    """

    format: str
    origin_id: str
    size_bytes: NDArray[np.int64]
    num_samples: NDArray[np.int64]
    digest: str
    _uri_stop: NDArray[np.int64] = field(repr=False)
    _version_stop: NDArray[np.int64] = field(repr=False)
    _uris: memoryview = field(repr=False)
    _versions: memoryview = field(repr=False)
    _block: memoryview = field(repr=False)

    def __len__(self) -> int:
        return len(self.size_bytes)

    @property
    def total_samples(self) -> int:
        """Samples in all shards together."""
        return int(self.num_samples.sum())

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards together."""
        return int(self.size_bytes.sum())

    def uri(self, shard: int) -> str:
        """URI of shard number ``shard``."""
        return _text(self._uris, self._uri_stop, shard)

    def version(self, shard: int) -> str:
        """Version of shard number ``shard``."""
        return _text(self._versions, self._version_stop, shard)

    def shard(self, shard: int) -> ShardInfo:
        """All that is known of shard number ``shard``."""
        return ShardInfo(
            uri=self.uri(shard),
            size_bytes=int(self.size_bytes[shard]),
            version=self.version(shard),
            num_samples=int(self.num_samples[shard]),
        )

    def to_bytes(self) -> memoryview:
        """The block, as it is stored and sent."""
        return self._block

    @classmethod
    def build(cls, shards: Iterable[ShardInfo], *, format: str, origin_id: str) -> Self:  # noqa: A002
        """A manifest of ``shards`` in their given order."""
        rows = list(shards)
        uris = [row.uri.encode() for row in rows]
        versions = [row.version.encode() for row in rows]
        header = json.dumps(
            {"num_shards": len(rows), "format": format, "origin_id": origin_id}, sort_keys=True
        ).encode()
        header += b" " * (-len(header) % 8)
        columns = (
            [row.size_bytes for row in rows],
            [row.num_samples for row in rows],
            np.cumsum([len(uri) for uri in uris]),
            np.cumsum([len(version) for version in versions]),
        )
        numbers = [np.asarray(column, dtype="<i8").tobytes() for column in columns]
        prefix = [MAGIC, len(header).to_bytes(8, "little"), header]
        return cls.from_buffer(b"".join([*prefix, *numbers, *uris, *versions]))

    @classmethod
    def from_buffer(cls, block: Buffer) -> Self:
        """A manifest over ``block``, which must stay unchanged for as long as the manifest lives.

        Raises:
            ProtocolError: ``block`` is no manifest or a part of one is missing.
        """
        view = memoryview(block).cast("B").toreadonly()
        try:
            if view[:8] != MAGIC:
                raise ProtocolError(f"a block that starts with {bytes(view[:8])!r} is no manifest")
            start = 16 + int.from_bytes(view[8:16], "little")
            header = json.loads(bytes(view[16:start]))
            n = header["num_shards"]
            columns = np.frombuffer(view, dtype="<i8", count=4 * n, offset=start).reshape(4, n)
            uris_start = start + 32 * n
            versions_start = uris_start + (int(columns[2, -1]) if n else 0)
            stop = versions_start + (int(columns[3, -1]) if n else 0)
            if stop != len(view):
                raise ProtocolError(f"a manifest of {n} shards should hold {stop} bytes and holds {len(view)}")
            format_name, origin_id = str(header["format"]), str(header["origin_id"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ProtocolError(f"a block of {len(view)} bytes is no manifest: {error}") from error
        return cls(
            format=format_name,
            origin_id=origin_id,
            size_bytes=columns[0],
            num_samples=columns[1],
            digest=hashlib.blake2b(view, digest_size=16).hexdigest(),
            _uri_stop=columns[2],
            _version_stop=columns[3],
            _uris=view[uris_start:versions_start],
            _versions=view[versions_start:],
            _block=view,
        )


def _text(texts: memoryview, stops: NDArray[np.int64], index: int) -> str:
    if not 0 <= index < len(stops):
        raise IndexError(f"shard {index} of a manifest of {len(stops)} shards")
    return bytes(texts[int(stops[index - 1]) if index else 0 : int(stops[index])]).decode()
