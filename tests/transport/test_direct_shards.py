from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from cacheloader import fdpass
from cacheloader.errors import OriginDenied
from cacheloader.transport.direct_shards import ShardInMemory, ShardMemory
from tests.support.waiting import until

if TYPE_CHECKING:
    from cacheloader.origin.slots import Urgency

SIZE = 100


class Origin:
    """Counts fetches and lets each wait for its gate."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.urgency: dict[int, Urgency] = {}
        self.gates: dict[int, asyncio.Event] = {}
        self.broken: set[int] = set()

    async def fetch(self, shard: int, urgency: Urgency) -> ShardInMemory:
        self.fetched.append(shard)
        self.urgency[shard] = urgency
        if shard in self.gates:
            await self.gates[shard].wait()
        if shard in self.broken:
            raise OriginDenied("no")
        return ShardInMemory(
            data_fd=fdpass.sealed_memory_file("d", bytes([shard]) * SIZE),
            index_fd=fdpass.sealed_memory_file("i", b"i"),
            size_bytes=SIZE,
            index_bytes=1,
        )


@pytest.fixture
def origin() -> Origin:
    return Origin()


@pytest.fixture
async def memory(origin):
    memory = ShardMemory(origin.fetch, size_bytes_of=lambda _: SIZE, budget_bytes=3 * SIZE)
    yield memory
    await memory.aclose()


async def idle(memory: ShardMemory, shards: list[int]) -> None:
    await until(lambda: all(shard in memory._held for shard in shards))


async def test_shard_is_fetched_once_for_all_that_wait(origin, memory):
    origin.gates[4] = asyncio.Event()
    waits = [asyncio.create_task(memory.acquire(4)) for _ in range(3)]
    await until(lambda: bool(origin.fetched))
    origin.gates[4].set()
    for data, was_here in await asyncio.gather(*waits):
        assert os.pread(data.data_fd, SIZE, 0) == bytes([4]) * SIZE
        assert not was_here
    assert (await memory.acquire(4))[1]
    assert origin.fetched == [4]


async def test_leased_shards_are_kept_beyond_the_budget_and_counted_when_they_are_given_back(origin, memory):
    for shard in range(6):
        await memory.acquire(shard)
    assert memory.idle_bytes == 0
    for shard in range(6):
        memory.release(shard)
        assert memory.idle_bytes <= 3 * SIZE
    assert list(memory._held) == [3, 4, 5]


async def test_shard_leased_twice_is_kept_until_both_are_given_back(origin, memory):
    await memory.acquire(0)
    data, _ = await memory.acquire(0)
    memory.release(0)
    for shard in (1, 2, 3, 4):
        await memory.acquire(shard)
        memory.release(shard)
    assert os.pread(data.data_fd, 1, 0) == b"\0"
    memory.release(0)
    memory.release(0)
    assert origin.fetched == [0, 1, 2, 3, 4]


async def test_shards_needed_soon_are_fetched_in_order_and_within_the_budget(origin, memory):
    memory.prepare([5, 6, 7, 8])
    await idle(memory, [5, 6, 7])
    assert origin.fetched == [5, 6, 7]
    memory.prepare([5, 6, 7, 8])
    assert origin.fetched == [5, 6, 7]


async def test_fetching_ahead_drops_what_is_not_needed_soon_and_nothing_else(origin, memory):
    for shard in (0, 1, 2):
        await memory.acquire(shard)
        memory.release(shard)
    memory.prepare([0, 5, 6])
    await idle(memory, [0, 5, 6])
    assert origin.fetched == [0, 1, 2, 5, 6]


async def test_leased_shard_that_comes_back_pushes_out_what_is_needed_last(origin, memory):
    await memory.acquire(0)
    memory.prepare([5, 6, 7])
    await idle(memory, [5, 6, 7])
    memory.release(0)
    assert sorted(memory._held) == [5, 6, 7]


async def test_waiting_for_a_fetch_ahead_makes_it_urgent(origin, memory):
    origin.gates[5] = asyncio.Event()
    memory.prepare([5])
    await until(lambda: bool(origin.fetched))
    assert not origin.urgency[5].demanded
    wait = asyncio.create_task(memory.acquire(5))
    await until(lambda: origin.urgency[5].demanded)
    origin.gates[5].set()
    await wait
    assert origin.fetched == [5]


async def test_failed_fetch_ahead_is_asked_again_by_whoever_needs_it(origin, memory):
    origin.broken.add(5)
    memory.prepare([5])
    await until(lambda: 5 not in memory)
    with pytest.raises(OriginDenied):
        await memory.acquire(5)
    origin.broken.clear()
    await memory.acquire(5)
    assert origin.fetched == [5, 5, 5]


async def test_cancelled_wait_leaves_no_lease_and_the_fetch_goes_on(origin, memory):
    origin.gates[5] = asyncio.Event()
    wait = asyncio.create_task(memory.acquire(5))
    await until(lambda: bool(origin.fetched))
    wait.cancel()
    await asyncio.gather(wait, return_exceptions=True)
    origin.gates[5].set()
    await idle(memory, [5])
    assert memory.idle_bytes == SIZE


async def test_a_fetch_that_nobody_wants_any_more_ends_and_its_shard_can_be_asked_for_again(origin, memory):
    origin.gates[5] = asyncio.Event()
    memory.prepare([5])
    await until(lambda: bool(origin.fetched))
    memory.prepare([6])
    wait = asyncio.create_task(memory.acquire(5))  # before the first fetch has noticed its end
    assert memory.idle_bytes == SIZE
    await until(lambda: origin.fetched == [5, 6, 5])
    origin.gates[5].set()
    data, _ = await wait
    assert os.pread(data.data_fd, 1, 0) == b"\5"


async def test_a_fetch_that_somebody_waits_for_goes_on_whatever_is_needed_soon(origin, memory):
    origin.gates[5] = asyncio.Event()
    wait = asyncio.create_task(memory.acquire(5))
    await until(lambda: bool(origin.fetched))
    memory.prepare([6])
    origin.gates[5].set()
    await wait
    assert origin.fetched == [5, 6]


async def test_shard_larger_than_the_budget_is_still_lent(origin):
    memory = ShardMemory(origin.fetch, size_bytes_of=lambda _: SIZE, budget_bytes=SIZE // 2)
    memory.prepare([0])
    assert origin.fetched == []
    data, _ = await memory.acquire(0)
    assert data.size_bytes == SIZE
    memory.release(0)
    assert memory.idle_bytes == 0
    await memory.aclose()


async def test_closing_ends_fetches_and_closes_files(origin, memory):
    origin.gates[5] = asyncio.Event()
    memory.prepare([4, 5])
    await idle(memory, [4])
    fd = memory._held[4].data_fd
    await memory.aclose()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    assert 5 not in memory
