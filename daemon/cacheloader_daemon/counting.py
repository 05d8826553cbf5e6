"""Counting samples by fetching shards into the cache: the one scan of a data set is also what warms it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from cacheloader.formats.base import index_samples
from cacheloader.keys import shard_key
from cacheloader.manifest.asking import ask_each
from cacheloader.manifest.record import Manifest, ShardInfo
from cacheloader.manifest.resolve import format_of
from cacheloader_daemon.shards import UNKNOWN_COUNT, Dataset
from cacheloader_daemon.store import DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheloader.origin.base import ObjectInfo, Origin
    from cacheloader_daemon.disk import DiskThreads
    from cacheloader_daemon.runtime import Runtime
    from cacheloader_daemon.store import Pool
    from cacheloader_daemon.tenants import Visitor

log = logging.getLogger(__name__)


class CacheCounter:
    """A ``manifest.resolve.SampleCounter`` that keeps what it read for it.

    Counts known from an earlier scan are taken from the store. The others are demanded like a reader would, as a
    session of their own: what fits stays in the cache, the rest is indexed and dropped.

    Args:
        origin: Where the shards lie.
        format_name: Their format, "" if their names tell it.
        runtime: Brings them.
        store: Knows counts.
        disk: Threads for asking it.
        shards_in_flight: Shards demanded at once.
        realm: As for ``Dataset``.
        visitor: On whose behalf.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        format_name: str,
        runtime: Runtime,
        store: Pool,
        disk: DiskThreads,
        shards_in_flight: int,
        realm: str = "",
        visitor: Visitor | None = None,
    ) -> None:
        self._origin = origin
        self._format_name = format_name
        self._runtime = runtime
        self._store = store
        self._disk = disk
        self._shards_in_flight = shards_in_flight
        self._realm = realm
        self._visitor = visitor

    async def count(self, shards: Sequence[ObjectInfo], *, progress: Callable[[int, int], None]) -> list[int]:
        """Samples of each shard, in order (see ``SampleCounter``)."""
        counts = await self._disk.run(self._known, shards)
        unknown = [number for number, count in enumerate(counts) if count is None]
        if unknown:
            num_known = len(shards) - len(unknown)
            scanned = await self._scan(
                [shards[number] for number in unknown], progress=lambda done: progress(num_known + done, len(shards))
            )
            for number, count in zip(unknown, scanned, strict=True):
                counts[number] = count
        return [count for count in counts if count is not None]

    def _known(self, shards: Sequence[ObjectInfo]) -> list[int | None]:
        try:
            return [self._store.samples(self._key(info)) for info in shards]
        except DiskTrouble as error:
            log.warning("sample counts of earlier scans cannot be read: %s", error)
            return [None] * len(shards)

    def _key(self, info: ObjectInfo) -> bytes:
        return shard_key(
            origin_id=self._origin.origin_id + self._realm,
            uri=info.uri,
            version=info.version,
            size_bytes=info.size_bytes,
        )

    async def _scan(self, shards: Sequence[ObjectInfo], *, progress: Callable[[int], None]) -> list[int]:
        shard_format = format_of(self._format_name, (info.uri for info in shards))
        dataset = await asyncio.to_thread(self._provisional, shards, shard_format.name)
        session = self._runtime.open_session(dataset, visitor=self._visitor)

        async def count(shard: int) -> int:
            lease = await self._runtime.acquire(session, shard)
            try:
                return index_samples(lease.index_head)
            finally:
                lease.close()
                self._runtime.release(session, shard)

        try:
            return await ask_each(range(len(shards)), count, in_flight=self._shards_in_flight, progress=progress)
        finally:
            self._runtime.close_session(session)

    def _provisional(self, shards: Sequence[ObjectInfo], format_name: str) -> Dataset:
        rows = (
            ShardInfo(uri=info.uri, size_bytes=info.size_bytes, version=info.version, num_samples=UNKNOWN_COUNT)
            for info in shards
        )
        manifest = Manifest.build(rows, format=format_name, origin_id=self._origin.origin_id)
        return Dataset(manifest, self._origin, reserve_bytes=self._store.reserve_bytes, realm=self._realm)
