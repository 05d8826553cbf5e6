"""Limits of pace: no more in any stretch of time than is allowed, and who waits goes first."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from cacheloader_daemon import rates
from cacheloader_daemon.rates import BURST_S, Meter, OriginRate
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheloader.origin.slots import Urgency
from tests.support.hand_clock import HandClock
from tests.support.waiting import until


@settings(deadline=None)
@given(
    per_s=st.floats(1, 1e6),
    steps=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1e5)), min_size=1, max_size=60),
)
def test_in_no_stretch_of_time_more_is_spent_than_allowed(per_s: float, steps: list[tuple[float, float]]) -> None:
    meter, now_s, spent = Meter(per_s), 100.0, []
    for pause_s, units in steps:
        now_s += pause_s
        now_s += meter.wait_s(now_s)
        meter.spend(units, now_s)
        spent.append((now_s, units))
    for first, (start_s, _) in enumerate(spent):
        for last in range(first, len(spent)):
            # The last of them may be as large as it likes; it is paid for by those after it.
            units = sum(units for _, units in spent[first:last])
            assert units <= per_s * (spent[last][0] - start_s + BURST_S) * (1 + 1e-9) + 1e-6


def test_without_a_limit_nobody_waits() -> None:
    meter = Meter(0)
    for _ in range(100):
        meter.spend(1e9, 0.0)
        assert meter.wait_s(0.0) == 0


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """Time for the limits alone."""
    clock = HandClock()
    monkeypatch.setattr(rates, "asyncio", SimpleNamespace(get_running_loop=lambda: clock))
    return clock


async def test_who_is_waited_for_goes_before_what_is_fetched_ahead(clock: HandClock) -> None:
    rate = OriginRate(max_bytes_per_s=1000)
    came: list[str] = []

    async def take(name: str, *, demanded: bool) -> None:
        await rate.take(20, Urgency(demanded=demanded))
        came.append(name)

    await rate.take(300, Urgency(demanded=False))  # what was not used before is spent
    all_three = asyncio.gather(
        take("ahead", demanded=False), take("more ahead", demanded=False), take("now", demanded=True)
    )
    await until(lambda: len(rate._waiters) == 3)
    clock.let_pass(1.0)
    await all_three
    assert came[0] == "now"


async def test_who_gives_up_holds_nobody_up(clock: HandClock) -> None:
    rate = OriginRate(max_requests_per_s=16)
    for _ in range(5):
        await rate.take(1, Urgency(demanded=True))
    waiting = asyncio.create_task(rate.take(1, Urgency(demanded=True)))
    await until(lambda: len(rate._waiters) == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    last = asyncio.create_task(rate.take(1, Urgency(demanded=True)))
    await until(lambda: len(rate._waiters) == 1)
    clock.let_pass(1.0)
    await asyncio.wait_for(last, 60)
