"""Ceiling of a cold epoch: the product's own engine, parallel ranged GETs to files, and nothing else."""

from __future__ import annotations

import asyncio
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter


class Engine:
    """obstore under uvloop, as the daemon uses it.

    Args:
        range_bytes: Bytes of one request, the daemon's default if not given.
        concurrency: Requests in flight, the daemon's default if not given.
        first: Number of a shard to write before all others, which counts as the first batch.
        reuse_memory: Whether the C library keeps the memory of a body for the next one, as the daemon lets it.
    """

    def __init__(
        self,
        *,
        range_bytes: int | None = None,
        concurrency: int | None = None,
        first: int | None = None,
        reuse_memory: bool = False,
    ) -> None:
        from cacheloader_daemon.config import DaemonConfig

        defaults = DaemonConfig(cache_dir=Path("/"))
        self._range_bytes = range_bytes or defaults.range_bytes
        self._concurrency = concurrency or defaults.max_range_requests
        self._first = first
        self._reuse_memory = reuse_memory

    def prepare(self, task: Task) -> None:
        """Import the engine."""
        if self._reuse_memory:
            from cacheloader_daemon.allocator import reuse_freed_memory

            reuse_freed_memory()
        import obstore.store
        import uvloop

        origin = task.origin()
        self._loop = uvloop.new_event_loop()
        self._store = obstore.store.S3Store(
            origin.bucket,
            endpoint=origin.endpoint_url,
            access_key_id=origin.key,
            secret_access_key=origin.secret,
            region=origin.region,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def run(self, task: Task, meter: Meter) -> Measurement:
        """One cold epoch: every shard to a file."""
        paths = [Path(task.folder, name) for name in task.shard_names]
        with meter.phase("cold", page_cache="no files; the store's files in memory") as clock:
            rest = list(range(len(paths)))
            if self._first is not None:
                self._loop.run_until_complete(self._download(task, paths, [self._first]))
                clock.first_batch_s = clock.elapsed_s
                rest.remove(self._first)
            self._loop.run_until_complete(self._download(task, paths, rest))
            clock.add(samples=task.expected.samples, size_bytes=task.expected.size_bytes)
            clock.end_epoch()
        meter.verify(_samples(paths))
        return meter.measurement(
            {
                "engine": "obstore get_range_async under uvloop, os.pwrite in threads",
                "range bytes": self._range_bytes,
                "requests in flight": self._concurrency,
                "memory of a body": "reused" if self._reuse_memory else "as the C library has it",
            }
        )

    async def _download(self, task: Task, paths: list[Path], shards: list[int]) -> None:
        gate = asyncio.Semaphore(self._concurrency)
        prefix = task.origin().prefix
        descriptors = {shard: os.open(paths[shard], os.O_WRONLY | os.O_CREAT | os.O_EXCL) for shard in shards}
        async with asyncio.TaskGroup() as group:
            for shard, descriptor in descriptors.items():
                size_bytes = task.shard_bytes[shard]
                for start in range(0, size_bytes, self._range_bytes):
                    stop = min(start + self._range_bytes, size_bytes)
                    key = prefix + task.shard_names[shard]
                    group.create_task(self._fetch(gate, descriptor, key, start, stop))
        for descriptor in descriptors.values():
            os.close(descriptor)

    async def _fetch(self, gate: asyncio.Semaphore, descriptor: int, key: str, start: int, stop: int) -> None:
        import obstore

        async with gate:
            body: Any = await obstore.get_range_async(self._store, key, start=start, end=stop)
            await asyncio.to_thread(os.pwrite, descriptor, body, start)


def _samples(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                yield member.name.partition(".")[0], file.read()
