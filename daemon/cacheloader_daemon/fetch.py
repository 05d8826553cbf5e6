"""Bringing one shard, into the store or past a broken disk into memory, and handing out what is there."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from cacheloader import fdpass
from cacheloader.formats.base import index_samples
from cacheloader.origin.slots import Urgency
from cacheloader.origin.transfer import transfer
from cacheloader_daemon import pages
from cacheloader_daemon.arrivals import Arrivals
from cacheloader_daemon.checksum import ShardChecksum
from cacheloader_daemon.index_worker import DiskReadFailed
from cacheloader_daemon.lease import SAMPLE_COUNT_BYTES, ShardLease
from cacheloader_daemon.store import DiskTrouble, disk_trouble

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cacheloader.origin.base import Bytes
    from cacheloader.origin.slots import TransferSlots
    from cacheloader.origin.transfer import TransferLimits
    from cacheloader_daemon.disk import DiskThreads
    from cacheloader_daemon.index_worker import Prepared
    from cacheloader_daemon.prepare import Preparers
    from cacheloader_daemon.rates import OriginRates
    from cacheloader_daemon.shards import ShardSource
    from cacheloader_daemon.store import Incoming, Pool, Survey

log = logging.getLogger(__name__)

MAX_MEMORY_FETCHES = 4
"""Shards brought into memory at once; how many bytes may be held there, ``memory`` says."""


class Fetcher:
    """Carries bytes. What may wait for the disk runs on threads: bulk writes on some, everything short on others.

    Args:
        store: Where blobs lie.
        preparers: Index shards.
        slots: The budget that all transfers of the process share.
        limits: Width and deadlines of one transfer.
        quick: Threads for calls that a reader waits for.
        bulk: Threads for writes.
        rates: Limits of pace; ``None`` for none.
        drops_behind: Whether pages that were written or read are not kept in memory for long.

    Attributes:
        arrivals: What is on its way.
    """

    def __init__(
        self,
        *,
        store: Pool,
        preparers: Preparers,
        slots: TransferSlots,
        limits: TransferLimits,
        quick: DiskThreads,
        bulk: DiskThreads,
        rates: OriginRates | None = None,
        drops_behind: bool = False,
    ) -> None:
        self._store = store
        self._preparers = preparers
        self._slots = slots
        self._limits = limits
        self._quick = quick
        self._bulk = bulk
        self._rates = rates
        self.drops_behind = drops_behind
        self.arrivals = Arrivals()
        self._urgencies: dict[bytes, Urgency] = {}
        self._memory_fetches = asyncio.Semaphore(MAX_MEMORY_FETCHES)

    def promote(self, key: bytes) -> None:
        """Somebody waits for a shard that is being fetched ahead."""
        urgency = self._urgencies.get(key)
        if urgency is not None:
            urgency.demanded = True

    async def into_store(self, source: ShardSource, *, is_demand: bool) -> int:
        """Bring a shard into the store, whole and indexed, or leave nothing.

        Returns:
            Bytes that it takes on disk.

        Raises:
            DiskTrouble: The cache's disk is at fault.
            OriginError: The origin is.
            DatasetError: The shard is not what it should be.
        """
        urgency = self._urgencies[source.key] = Urgency(demanded=is_demand)
        try:
            # From before the wait for the disk, in which a shard that was ordered later may overtake this one.
            with self._slots.announced(source.origin.origin_id, urgency):
                return await self._bring(source, urgency)
        except DiskReadFailed as error:
            raise DiskTrouble(*error.args) from error
        finally:
            del self._urgencies[source.key]

    async def _bring(self, source: ShardSource, urgency: Urgency) -> int:
        begun: list[Incoming] = []

        def begin() -> None:
            # Noted on the thread: a task that is cancelled meanwhile still has to undo it.
            begun.append(self._store.begin(source.key, size_bytes=source.info.size_bytes))

        def commit() -> int:
            self._remember(source, prepared)
            return incoming.commit(prepared.read_index(), checksum.value(incoming.size_bytes))

        try:
            await self._quick.run(begin)
            incoming = begun[0]
            checksum = ShardChecksum()

            async def write_at(offset: int, body: Bytes) -> None:
                await self._bulk.run(checksum.write, incoming.write_at, offset, body)
                if self.drops_behind:
                    await self._bulk.run(pages.begin_write_back, incoming.fd, offset, memoryview(body).nbytes)

            await self._transfer(source, write_at, urgency)
            prepared = await self._prepare(source, incoming.fd)
            try:
                used_bytes = await self._quick.run(commit)
            finally:
                prepared.close()
            begun.clear()
        finally:
            for incoming in begun:
                await self._quick.run(incoming.abort)
        return used_bytes

    async def into_memory(self, source: ShardSource) -> ShardLease:
        """Bring a shard into a memory file that nobody can change.

        Raises:
            OriginError: The origin is at fault.
            DatasetError: The shard is not what it should be.
        """
        async with self._memory_fetches:
            data_fd = os.memfd_create("shard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(data_fd, source.info.size_bytes)

                async def write_at(offset: int, body: Bytes) -> None:
                    await self._bulk.run(fdpass.write_whole, data_fd, body, offset=offset)

                await self._transfer(source, write_at, Urgency(demanded=True))
                fdpass.seal(data_fd)
                prepared = await self._prepare(source, data_fd)
                try:
                    await self._quick.run(self._remember, source, prepared)
                except BaseException:
                    prepared.close()
                    raise
            except BaseException:
                os.close(data_fd)
                raise
        return ShardLease(
            data_fd=data_fd,
            index_fd=prepared.index_fd,
            size_bytes=source.info.size_bytes,
            index_bytes=prepared.index_bytes,
            source="memory",
            index_head=os.pread(prepared.index_fd, SAMPLE_COUNT_BYTES, 0),
        )

    async def lease(self, key: bytes, *, source: str) -> ShardLease:
        """Open a blob.

        Raises:
            BlobLost: It is gone, or was damaged and is gone now.
            DiskTrouble: It cannot be opened for another reason.
        """

        def open_blob() -> ShardLease:
            blob = self._store.lease(key)
            try:
                with disk_trouble("reading an index", key.hex()):
                    index_head = os.pread(blob.index_fd, SAMPLE_COUNT_BYTES, 0)
            except BaseException:
                os.close(blob.data_fd)
                os.close(blob.index_fd)
                raise
            return ShardLease(
                data_fd=blob.data_fd,
                index_fd=blob.index_fd,
                size_bytes=blob.size_bytes,
                index_bytes=blob.index_bytes,
                source=source,
                index_head=index_head,
            )

        # A blob that has to be verified is read whole, which must not keep others from being opened.
        threads = self._bulk if self._store.is_slow(key) else self._quick
        return await threads.take(open_blob, discard=ShardLease.close)

    async def let_go(self, key: bytes) -> None:
        """Drop a blob's pages from memory, if it is there."""

        def drop() -> None:
            blob = self._store.lease(key)
            try:
                pages.let_go(blob.data_fd)
            finally:
                os.close(blob.data_fd)
                os.close(blob.index_fd)

        try:
            await self._bulk.run(drop)
        except DiskTrouble as error:
            log.info("pages of blob %s are not dropped: %s", key.hex(), error)

    async def evict(self, key: bytes) -> None:
        """Unlink a blob.

        Raises:
            DiskTrouble: It cannot be unlinked.
        """
        await self._quick.run(self._store.evict, key)

    async def survey(self) -> Survey:
        """What the cache's disks can do now."""
        return await self._quick.run(self._store.survey)

    @property
    def leftover_bytes(self) -> int:
        """What damaged blobs take that are kept, and files that a disk did not let us unlink."""
        return self._store.leftover_bytes

    def has(self, key: bytes) -> bool:
        """Whether the store knows a blob."""
        return key in self._store

    async def _transfer(
        self, source: ShardSource, write: Callable[[int, Bytes], Awaitable[None]], urgency: Urgency
    ) -> None:
        slots = self._slots if self._rates is None else self._rates.slots(self._slots, source.origin)
        with self.arrivals.watch(source) as arrival:

            async def write_at(offset: int, body: Bytes) -> None:
                await write(offset, body)
                arrival.arrived(memoryview(body).nbytes)

            await transfer(
                source.origin,
                source.info,
                write_at,
                limits=self._limits,
                slots=slots,
                urgency=urgency,
                failed=arrival.failed,
            )

    async def _prepare(self, source: ShardSource, fd: int) -> Prepared:
        info = source.info
        return await self._preparers.prepare(fd, format_name=source.format, uri=info.uri, size_bytes=info.size_bytes)

    def _remember(self, source: ShardSource, prepared: Prepared) -> None:
        count = index_samples(os.pread(prepared.index_fd, SAMPLE_COUNT_BYTES, 0))
        self._store.remember_samples(source.key, count)
