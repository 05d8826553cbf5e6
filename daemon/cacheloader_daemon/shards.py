"""A data set as the daemon works on it: a manifest, the origin that answers for it, and the keys of its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cacheloader.keys import shard_key
from cacheloader.origin.base import ObjectInfo
from cacheloader_daemon.plan.events import ShardRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.manifest.record import Manifest
    from cacheloader.origin.base import Origin

UNKNOWN_COUNT = -1
"""Sample count in a provisional manifest, whose shards are still to be counted."""


class ShardSource(msgspec.Struct, frozen=True, kw_only=True, eq=False):
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


class Dataset:
    """A manifest and its origin; shared by all sessions that read it, never changed."""

    def __init__(
        self, manifest: Manifest, origin: Origin, *, reserve_bytes: Callable[[int], int], realm: str = ""
    ) -> None:
        """Name every shard; takes some microseconds a shard, so call it on a thread.

        Args:
            manifest: The shards.
            origin: Where they come from.
            reserve_bytes: Upper bound of what a shard of so many bytes takes on disk.
            realm: Keeps its shards apart from those that the same store may have answered otherwise, see
                ``rights.realm``.
        """
        self.manifest = manifest
        self.origin = origin
        sizes = manifest.size_bytes.tolist()
        keys = [
            shard_key(
                origin_id=manifest.origin_id + realm,
                uri=manifest.uri(shard),
                version=manifest.version(shard),
                size_bytes=size_bytes,
            )
            for shard, size_bytes in enumerate(sizes)
        ]
        # Made here and shared by all sessions: the planner, on the loop, knows a data set again by this list.
        self.shards = [
            ShardRef(key=key, reserve_bytes=reserve_bytes(size_bytes))
            for key, size_bytes in zip(keys, sizes, strict=True)
        ]
        self._index = {key: shard for shard, key in enumerate(keys)}

    def place(self, key: bytes) -> int | None:
        """Number of the shard ``key``; ``None`` if the data set has no such shard."""
        return self._index.get(key)

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
