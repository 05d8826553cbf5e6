"""A data set as the daemon works on it: a manifest, the origin that answers for it, and the keys of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from cacheloader.keys import KEY_BYTES, shard_key
from cacheloader.origin.base import ObjectInfo
from cacheloader_daemon.plan.events import ShardRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.manifest.record import Manifest
    from cacheloader.origin.base import Origin

UNKNOWN_COUNT = -1
"""Sample count in a provisional manifest, whose shards are still to be counted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardSource:
    """All that is needed to bring one shard.

    Attributes:
        key: Its identity on this node.
        info: What the origin calls it.
        format: Name of its format.
        origin: Who has it.
    """

    key: bytes
    info: ObjectInfo
    format: str
    origin: Origin


class ShardRefs(Sequence[ShardRef]):
    """The shards of a manifest as the planner sees them; 24 bytes a shard instead of an object."""

    def __init__(self, keys: bytes, reserve_bytes: Sequence[int]) -> None:
        self._keys = keys
        self._reserve_bytes = reserve_bytes

    def __len__(self) -> int:
        return len(self._reserve_bytes)

    @overload
    def __getitem__(self, index: int) -> ShardRef: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ShardRef]: ...

    def __getitem__(self, index: int | slice) -> ShardRef | Sequence[ShardRef]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        reserve_bytes = int(self._reserve_bytes[index])
        if index < 0:
            index += len(self)
        return ShardRef(key=self.key(index), reserve_bytes=reserve_bytes)

    def key(self, index: int) -> bytes:
        """Key of shard number ``index``."""
        return self._keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]


class Dataset:
    """A manifest and its origin; shared by all sessions that read it, never changed."""

    def __init__(self, manifest: Manifest, origin: Origin, *, reserve_bytes: Callable[[int], int]) -> None:
        """Name every shard; takes some microseconds a shard, so call it on a thread.

        Args:
            manifest: The shards.
            origin: Where they come from.
            reserve_bytes: Upper bound of what a shard of so many bytes takes on disk.
        """
        self.manifest = manifest
        self.origin = origin
        sizes = manifest.size_bytes.tolist()
        keys = [
            shard_key(
                origin_id=manifest.origin_id,
                uri=manifest.uri(shard),
                version=manifest.version(shard),
                size_bytes=size_bytes,
            )
            for shard, size_bytes in enumerate(sizes)
        ]
        self.shards = ShardRefs(b"".join(keys), [reserve_bytes(size_bytes) for size_bytes in sizes])
        self._index = {key: shard for shard, key in enumerate(keys)}

    def source(self, key: bytes) -> ShardSource | None:
        """How to bring the shard ``key``; ``None`` if the data set has no such shard."""
        shard = self._index.get(key)
        if shard is None:
            return None
        info = ObjectInfo(
            uri=self.manifest.uri(shard),
            size_bytes=int(self.manifest.size_bytes[shard]),
            version=self.manifest.version(shard),
        )
        return ShardSource(key=key, info=info, format=self.manifest.format, origin=self.origin)

    def check_count(self, shard: int, index: bytes) -> None:
        """Compare what the manifest promises of shard number ``shard`` with the head of its index.

        Raises:
            DatasetError: They differ.
        """
        from cacheloader.manifest.sidecar import check_count

        info = self.manifest.shard(shard)
        if info.num_samples != UNKNOWN_COUNT:
            check_count(info, index)
