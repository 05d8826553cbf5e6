"""Indexes of shards, made in processes of their own: so that it costs the node once, and the event loop nothing."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cacheloader.errors import DaemonError, DatasetError
from cacheloader_daemon.index_worker import IndexWorker, WorkerLost
from cacheloader_daemon.indexer import LOWEST_PRIORITY, PrepareShard

if TYPE_CHECKING:
    from cacheloader_daemon.index_worker import Prepared

log = logging.getLogger(__name__)

BASE_TIMEOUT_S = 30.0
"""Covers the start of a worker on a busy node."""

SLOWEST_BYTES_PER_S = 10 * 10**6
"""A guess at what an index takes at the lowest priority on a saturated node."""

BACKLOG_S = 0.25
"""How long a shard waits for a process that runs before another one is started: one keeps up with several GB/s where
samples are large, and its start costs as much as the indexes of twenty shards."""


class Preparers:
    """A few worker processes; a task waits for a free one.

    The first has the daemon's own priority, since a reader may wait for what it does. The others work off what piles
    up, and only when nobody else wants a core.

    Args:
        num_processes: How many at most.
        first: The first of them, which may run already; closed with the others.
    """

    def __init__(self, num_processes: int, first: IndexWorker | None = None) -> None:
        others = (IndexWorker(LOWEST_PRIORITY) for _ in range(1, num_processes))
        self._workers = [first or IndexWorker(0), *others]
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="prepare")
        self._free: asyncio.PriorityQueue[int] = asyncio.PriorityQueue()
        self._free.put_nowait(0)
        self._unused = list(range(1, num_processes))
        self._num_lost = 0
        self._is_closed = False

    @property
    def num_lost(self) -> int:
        """Workers that ended before they answered."""
        return self._num_lost

    @property
    def pids(self) -> list[int]:
        """Processes that run now."""
        return [pid for worker in self._workers if (pid := worker.pid)]

    async def warm(self) -> None:
        """Start the first process now, so that the first shard does not wait for its imports."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._workers[0].start)
        except (WorkerLost, DaemonError) as error:
            log.info("no index worker was started ahead: %r", error)

    async def prepare(self, fd: int, *, format_name: str, uri: str, size_bytes: int) -> Prepared:
        """Index of the shard in ``fd``.

        A worker that is lost (killed, out of memory) costs one more try.

        Raises:
            DatasetError: The shard is not what it should be, or it ended two workers.
            DeadlineExceeded: It took too long.
            DiskReadFailed: Its bytes cannot be read back.
        """
        task = PrepareShard(format=format_name, uri=uri, size_bytes=size_bytes)
        timeout_s = BASE_TIMEOUT_S + size_bytes / SLOWEST_BYTES_PER_S
        number = await self._free_worker()
        worker = self._workers[number]
        try:
            try:
                return await self._exchange(worker, task, fd, timeout_s)
            except WorkerLost:
                self._num_lost += 1
                log.warning("an indexing process was lost at %s; trying once more", uri)
            try:
                return await self._exchange(worker, task, fd, timeout_s)
            except WorkerLost:
                self._num_lost += 1
                raise DatasetError(
                    f"{uri} ended the indexing process twice (killed, or out of memory); the shard of {size_bytes} "
                    "bytes may be damaged, or the node short of memory",
                    uri=uri,
                ) from None
        finally:
            self._free.put_nowait(number)

    async def _free_worker(self) -> int:
        if self._unused and self._free.empty():
            try:
                async with asyncio.timeout(BACKLOG_S):
                    return await self._free.get()
            except TimeoutError:
                if self._unused:
                    return self._unused.pop(0)
        return await self._free.get()  # no deadline: each of those before has one

    async def _exchange(self, worker: IndexWorker, task: PrepareShard, fd: int, timeout_s: float) -> Prepared:
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, worker.exchange, task, fd, timeout_s)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The caller closes ``fd`` next, so the thread has to be done with it first.
            worker.kill()
            await asyncio.wait([work])
            if not work.cancelled() and work.exception() is None:
                work.result().close()
            raise

    async def aclose(self) -> None:
        """End all processes; calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, worker.close) for worker in self._workers))
        self._threads.shutdown(wait=True)
