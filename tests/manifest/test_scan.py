from __future__ import annotations

import asyncio
import threading

import pytest

from cacheloader.errors import CorruptShard, OriginChanged, OriginUnavailable
from cacheloader.formats.webdataset import WebDatasetFormat
from cacheloader.manifest.scan import ScanCounter
from tests.support.memory_origin import MemoryOrigin
from tests.support.tars import packed
from tests.support.waiting import until

FORMAT = WebDatasetFormat()


def shard(num_samples: int, size_bytes: int = 3000) -> bytes:
    return packed([(f"{i}.bin", bytes([i % 256]) * size_bytes) for i in range(num_samples)])


def store(*counts: int) -> MemoryOrigin:
    return MemoryOrigin({f"mem://bucket/{i:02d}.tar": shard(count) for i, count in enumerate(counts)})


async def infos(origin: MemoryOrigin):
    return [await origin.stat(uri) for uri in origin.objects]


async def test_samples_are_counted_in_order_with_progress():
    origin = store(3, 0, 12, 1)
    steps: list[tuple[int, int]] = []
    counter = ScanCounter(origin, FORMAT, read_bytes=4096)
    assert await counter.count(await infos(origin), progress=lambda *step: steps.append(step)) == [3, 0, 12, 1]
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


async def test_no_more_shards_are_read_at_once_than_allowed():
    origin = store(*[2] * 12)
    counter = ScanCounter(origin, FORMAT, shards_in_flight=3)
    assert await counter.count(await infos(origin), progress=lambda *_: None) == [2] * 12
    assert origin.most_in_flight <= 3


async def test_a_shard_is_read_in_steps_and_never_as_a_whole():
    origin = store(2000)
    sizes: list[int] = []
    read_range = origin.read_range

    async def watched(uri, byte_range, *, version):
        sizes.append(byte_range.size_bytes)
        return await read_range(uri, byte_range, version=version)

    origin.read_range = watched
    assert await ScanCounter(origin, FORMAT, read_bytes=1 << 20).count(
        await infos(origin), progress=lambda *_: None
    ) == [2000]
    assert max(sizes) <= 1 << 20
    assert 6 << 20 < sum(sizes) <= len(shard(2000)) + 512 * len(sizes)


async def test_a_damaged_shard_is_named_and_ends_the_scan():
    origin = store(3, 3, 3)
    origin.objects["mem://bucket/01.tar"] = shard(3)[:5000]
    with pytest.raises(CorruptShard, match=r"01\.tar is cut off at offset"):
        await ScanCounter(origin, FORMAT).count(await infos(origin), progress=lambda *_: None)


async def test_a_shard_that_changes_meanwhile_is_an_error():
    origin = store(3)
    described = await infos(origin)
    origin.objects["mem://bucket/00.tar"] = shard(4)
    with pytest.raises(OriginChanged):
        await ScanCounter(origin, FORMAT).count(described, progress=lambda *_: None)


async def test_a_store_that_stumbles_is_asked_again():
    origin = store(3)
    origin.fail(OriginUnavailable("away"), verb="read", times=2)
    assert await ScanCounter(origin, FORMAT).count(await infos(origin), progress=lambda *_: None) == [3]


async def test_a_scan_that_is_cancelled_leaves_no_thread_and_no_request_behind():
    origin = store(3, 3)
    described = await infos(origin)
    asked, left = asyncio.Event(), asyncio.Event()

    async def silent(uri, byte_range, *, version):
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    origin.read_range = silent
    task = asyncio.create_task(ScanCounter(origin, FORMAT).count(described, progress=lambda *_: None))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(left.wait(), 60)
    await until(lambda: not any(thread.name.startswith("cacheloader-scan") for thread in threading.enumerate()))
