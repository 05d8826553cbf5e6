"""Counting samples by reading the shards, for those whose counts nobody wrote down."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cacheloader.formats.base import index_samples
from cacheloader.manifest.asking import PatientOrigin, ask_each

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from cacheloader.formats.base import ShardFormat
    from cacheloader.origin.base import ObjectInfo, Origin

SHARDS_IN_FLIGHT = 16
READ_BYTES = 8 << 20
"""A shard is read in steps of this size, so that a scan never holds more than a step of each shard in flight."""


class ScanCounter:
    """Counts the samples of shards from their bytes; keeps nothing of them.

    Args:
        origin: The store; stays the caller's to close.
        shard_format: How to read them.
        shards_in_flight: Shards read at one time.
        read_bytes: Bytes asked for at one time, for each shard in flight.
    """

    def __init__(
        self,
        origin: Origin,
        shard_format: ShardFormat,
        *,
        shards_in_flight: int = SHARDS_IN_FLIGHT,
        read_bytes: int = READ_BYTES,
    ) -> None:
        self._origin = PatientOrigin(origin)
        self._format = shard_format
        self._shards_in_flight = shards_in_flight
        self._read_bytes = read_bytes

    async def count(self, shards: Sequence[ObjectInfo], *, progress: Callable[[int, int], None]) -> list[int]:
        """Samples of each shard, in order.

        Args:
            shards: What to count.
            progress: Called with (shards counted, shards in all).

        Raises:
            CorruptShard: A shard cannot be parsed.
            OriginError: The store failed.
        """
        loop = asyncio.get_running_loop()
        # Threads of its own: they wait for the loop, and must not keep others from the loop's own few threads.
        threads = ThreadPoolExecutor(self._shards_in_flight, thread_name_prefix="cacheloader-scan")

        async def count_one(info: ObjectInfo) -> int:
            source = _OriginSource(self._origin, info, loop=loop, read_bytes=self._read_bytes)
            try:
                index = await loop.run_in_executor(threads, self._index, source, info.uri)
            finally:
                source.abandon()
            return index_samples(index)

        try:
            return await ask_each(
                shards,
                count_one,
                in_flight=self._shards_in_flight,
                progress=lambda done: progress(done, len(shards)),
            )
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _index(self, source: _OriginSource, uri: str) -> bytes:
        return self._format.build_index(source, uri=uri)


class _OriginSource:
    """A shard in a store as a ``ByteSource`` for a thread, through a loop that runs in another one."""

    def __init__(
        self, origin: PatientOrigin, info: ObjectInfo, *, loop: asyncio.AbstractEventLoop, read_bytes: int
    ) -> None:
        self._origin = origin
        self._info = info
        self._loop = loop
        self._read_bytes = read_bytes
        self._step = b""
        self._step_start = 0
        self._reading: Future[bytes] | None = None
        self._abandoned = False

    @property
    def size_bytes(self) -> int:
        return self._info.size_bytes

    def read(self, start: int, stop: int) -> bytes:
        step_end = self._step_start + len(self._step)
        if not self._step_start <= start <= stop <= step_end:
            # What a read across the end of a step finds there is not asked for again.
            kept = self._step[start - self._step_start :] if self._step_start <= start < step_end else b""
            begin = start + len(kept)
            self._step = kept + self._ask(begin, min(max(stop, begin + self._read_bytes), self._info.size_bytes))
            self._step_start = start
        return self._step[start - self._step_start : stop - self._step_start]

    def abandon(self) -> None:
        """Make the thread that reads come to an end; called on the loop."""
        self._abandoned = True
        if self._reading is not None:
            self._reading.cancel()

    def _ask(self, start: int, stop: int) -> bytes:
        if self._abandoned:
            raise OSError(f"the scan of {self._info.uri} was given up")
        self._reading = asyncio.run_coroutine_threadsafe(self._origin.read(self._info, start, stop), self._loop)
        if self._abandoned:
            self._reading.cancel()
        try:
            return self._reading.result()
        except FutureCancelled as error:
            raise OSError(f"the scan of {self._info.uri} was given up") from error
