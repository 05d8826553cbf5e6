from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from cacheloader.errors import ConfigError
from cacheloader.origin import slots as slots_module
from cacheloader.origin.retry import Backoff
from cacheloader.origin.slots import TransferSlots, Urgency
from cacheloader.origin.width import FIRST_REQUESTS
from tests.support.loop_clock import LoopClock
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DEMAND, PREFETCH = Urgency(demanded=True), Urgency(demanded=False)


@pytest.fixture(autouse=True)
def _alone_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps an idle host to itself keeps it however long the machine pauses; one test is about its end."""
    monkeypatch.setattr(slots_module, "ALONE_S", 3600.0)


class Line:
    """Requests that wait for slots and stay inside until they are told to leave; notes the order of their starts."""

    def __init__(self, slots: TransferSlots) -> None:
        self.slots = slots
        self.started: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, name: str, *, urgency: Urgency = PREFETCH, size_bytes: int = 1, host: str = "host") -> None:
        self.leave[name] = asyncio.Event()

        async def request() -> None:
            async with self.slots.hold(host, size_bytes=size_bytes, urgency=urgency):
                self.started.append(name)
                await self.leave[name].wait()

        self.tasks[name] = asyncio.create_task(request())
        await asyncio.sleep(0)

    async def finish(self, name: str) -> None:
        self.leave[name].set()
        await self.tasks[name]
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def line(slots: TransferSlots) -> AsyncIterator[Line]:
    made = Line(slots)
    yield made
    for event in made.leave.values():
        event.set()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)
    assert slots.statistics().requests == slots.statistics().size_bytes == slots.statistics().waiting == 0


async def test_no_more_requests_than_allowed_run_at_once():
    async with line(TransferSlots(max_requests=2)) as waiting:
        for name in "abcd":
            await waiting.add(name)
        assert waiting.started == ["a", "b"]
        await waiting.finish("a")
        assert waiting.started == ["a", "b", "c"]


async def test_no_more_bytes_than_allowed_are_asked_for():
    async with line(TransferSlots(max_bytes=10)) as waiting:
        await waiting.add("a", size_bytes=6)
        await waiting.add("b", size_bytes=6)
        await waiting.add("c", size_bytes=3)
        assert waiting.started == ["a"], "c would fit, but nobody overtakes b"
        await waiting.finish("a")
        assert waiting.started == ["a", "b", "c"]


async def test_a_request_larger_than_the_budget_runs_alone():
    async with line(TransferSlots(max_bytes=10)) as waiting:
        await waiting.add("small")
        await waiting.add("huge", size_bytes=1000)
        assert waiting.started == ["small"]
        await waiting.finish("small")
        await waiting.add("next")
        assert waiting.started == ["small", "huge"]
        await waiting.finish("huge")
        assert waiting.started == ["small", "huge", "next"]


async def test_demand_goes_before_prefetch_that_came_first():
    async with line(TransferSlots(max_requests=1)) as waiting:
        await waiting.add("running")
        await waiting.add("prefetch")
        await waiting.add("demand", urgency=DEMAND)
        await waiting.add("later demand", urgency=DEMAND)
        for name in ("running", "demand", "later demand"):
            await waiting.finish(name)
        assert waiting.started == ["running", "demand", "later demand", "prefetch"]


async def test_a_prefetch_that_somebody_begins_to_wait_for_moves_ahead():
    urgency = Urgency()
    async with line(TransferSlots(max_requests=1)) as waiting:
        await waiting.add("running")
        await waiting.add("first")
        await waiting.add("second", urgency=urgency)
        urgency.demanded = True
        await waiting.finish("running")
        assert waiting.started == ["running", "second"]


async def test_what_an_idle_host_is_asked_for_first_comes_before_anything_else_ahead_of_time_begins():
    first, second = Urgency(), Urgency()
    async with line(TransferSlots()) as waiting:
        await waiting.add("first a", urgency=first)
        await waiting.add("second a", urgency=second)
        await waiting.add("first b", urgency=first)
        await waiting.add("second b", urgency=second)
        await waiting.add("elsewhere", urgency=second, host="other")
        await waiting.finish("first a")
        assert waiting.started == ["first a", "first b", "elsewhere"]
        await waiting.finish("first b")
        assert waiting.started[3:] == ["second a", "second b"]


async def test_what_somebody_waits_for_joins_the_transfer_that_has_an_idle_host_alone():
    async with line(TransferSlots()) as waiting:
        await waiting.add("ahead", urgency=Urgency())
        await waiting.add("demand", urgency=DEMAND)
        assert waiting.started == ["ahead", "demand"]


async def test_an_idle_host_is_kept_for_the_transfer_that_was_announced_first():
    first, second = Urgency(), Urgency()
    slots = TransferSlots()
    async with line(slots) as waiting:
        with slots.announced("host", first), slots.announced("host", second):
            await waiting.add("second", urgency=second)
            await waiting.add("first", urgency=first)
            assert waiting.started == ["first"]


async def test_others_join_when_what_the_first_transfer_brought_can_be_used_and_not_at_its_last_byte():
    first, second = Urgency(), Urgency()
    slots = TransferSlots()
    async with line(slots) as waiting:
        with slots.announced("host", first):
            await waiting.add("first", urgency=first)
            await waiting.add("second", urgency=second)
            await waiting.finish("first")
            assert waiting.started == ["first"]
        await waiting.settle()
        assert waiting.started == ["first", "second"]


async def test_an_announced_transfer_that_never_asks_makes_room_for_the_next():
    slots = TransferSlots()
    async with line(slots) as waiting:
        with slots.announced("host", Urgency()):
            await waiting.add("second", urgency=Urgency())
            assert waiting.started == []
        await waiting.settle()
        assert waiting.started == ["second"]


async def test_a_first_transfer_that_takes_long_does_not_keep_others_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slots_module, "ALONE_S", 0.01)
    async with line(TransferSlots()) as waiting:
        await waiting.add("first", urgency=Urgency())
        await waiting.add("second", urgency=Urgency())
        await until(lambda: waiting.started == ["first", "second"])


async def test_a_first_transfer_that_is_given_up_makes_room_for_the_next():
    async with line(TransferSlots()) as waiting:
        await waiting.add("first", urgency=Urgency())
        await waiting.add("second", urgency=Urgency())
        waiting.tasks["first"].cancel()
        await waiting.settle()
        assert waiting.started == ["first", "second"]


async def test_a_waiter_that_gives_up_is_forgotten():
    async with line(TransferSlots(max_requests=1)) as waiting:
        for name in "abc":
            await waiting.add(name)
        waiting.tasks["b"].cancel()
        await waiting.finish("a")
        assert waiting.started == ["a", "c"]


async def test_a_waiter_that_gives_up_at_the_moment_of_its_grant_gives_the_slot_back():
    slots = TransferSlots(max_requests=1)
    async with line(slots) as waiting:
        async with slots.hold("host", size_bytes=1, urgency=PREFETCH):
            await waiting.add("b")
            await waiting.add("c")
        waiting.tasks["b"].cancel()  # it was granted as the block ended, and has not run since
        await waiting.settle()
        assert waiting.started == ["c"]


async def test_a_large_request_that_gives_up_lets_the_small_ones_pass():
    async with line(TransferSlots(max_bytes=10)) as waiting:
        await waiting.add("a", size_bytes=6)
        await waiting.add("b", size_bytes=6)
        await waiting.add("c", size_bytes=3)
        waiting.tasks["b"].cancel()
        await waiting.settle()
        assert waiting.started == ["a", "c"]


async def test_a_host_that_says_slow_down_is_left_alone_while_others_go_on():
    slots = TransferSlots(max_requests=8, backoff=Backoff(first_s=0.2), random_unit=lambda: 0.5)
    with LoopClock() as clock:
        async with line(slots) as waiting:
            slots.throttled("slow", started_s=asyncio.get_running_loop().time())
            await waiting.add("slow", host="slow")
            await waiting.add("quick", host="quick")
            clock.advance(0.099)
            await clock.settle()
            assert waiting.started == ["quick"]
            clock.advance(0.001)
            await clock.settle()
            assert waiting.started == ["quick", "slow"]
            assert slots.statistics().throttled_total == 1


async def test_a_throttled_host_gets_half_the_requests_and_earns_the_rest_back():
    slots = TransferSlots(max_requests=4, backoff=Backoff(first_s=0.0))
    clock = asyncio.get_running_loop().time
    async with line(slots) as waiting:
        slots.throttled("host", started_s=clock())
        for name in "abcd":
            await waiting.add(name)
        assert waiting.started == list("ab")
        for _ in range(16):
            slots.succeeded("host", started_s=clock(), size_bytes=1)
        await waiting.finish("a")
        assert waiting.started == list("abcd")


async def test_requests_of_the_transfer_that_began_first_go_first():
    slots = TransferSlots(max_requests=1)
    first, second = Urgency(), Urgency()
    async with line(slots) as waiting:
        await waiting.add("first 1", urgency=first)
        await waiting.add("second 1", urgency=second)
        await waiting.add("first 2", urgency=first)
        await waiting.finish("first 1")
        assert waiting.started == ["first 1", "first 2"]


async def test_a_new_host_gets_few_requests_at_first():
    slots = TransferSlots(max_requests=32)
    async with line(slots) as waiting:
        for number in range(32):
            await waiting.add(str(number))
        assert len(waiting.started) == FIRST_REQUESTS


async def test_under_random_load_the_budget_holds_and_everybody_gets_a_turn():
    chance = random.Random(11)
    slots = TransferSlots(max_bytes=100, max_requests=5, backoff=Backoff(first_s=0.001), random_unit=chance.random)
    clock, served = asyncio.get_running_loop().time, 0

    async def request() -> None:
        nonlocal served
        host = chance.choice("xyz")
        urgency = Urgency(demanded=chance.random() < 0.3)
        size_bytes = chance.choice([1, 10, 60, 150])
        async with slots.hold(host, size_bytes=size_bytes, urgency=urgency):
            now = slots.statistics()
            assert now.requests <= 5
            assert now.size_bytes <= 100 or now.requests == 1
            started_s = clock()
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            if chance.random() < 0.2:
                slots.throttled(host, started_s=started_s)
            else:
                slots.succeeded(host, started_s=started_s, size_bytes=size_bytes)
            served += 1

    tasks = [asyncio.create_task(request()) for _ in range(300)]
    for task in chance.sample(tasks, 40):
        asyncio.get_running_loop().call_later(chance.random() * 0.02, task.cancel)
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert served + cancelled >= 300
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert slots.statistics().requests == slots.statistics().size_bytes == slots.statistics().waiting == 0


@pytest.mark.parametrize("wrong", [{"max_bytes": 0}, {"max_requests": 0}])
async def test_a_budget_of_nothing_is_refused(wrong: dict[str, int]):
    with pytest.raises(ConfigError, match="allow no transfer"):
        TransferSlots(**wrong)
