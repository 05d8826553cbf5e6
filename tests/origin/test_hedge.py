"""Second requests: when they begin, what they may cost, and what they are good for on a store with a heavy tail."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ConfigError, OriginUnavailable
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.hedge import LEAST_KNOWN, Hedges
from cacheloader.origin.open import open_origin
from cacheloader.origin.slots import TransferSlots
from cacheloader.origin.transfer import TransferLimits, transfer
from tests.support.fault_proxy import FaultProxy, heavy_tail
from tests.support.seaweedfs import storage_options

if TYPE_CHECKING:
    from tests.support.seaweedfs import SeaweedServer

HOST = "s3://store"
SIZE = 1000


def known(*, share: float = 0.05, requests: int = 1000, duration_s: float = 0.01) -> Hedges:
    """Hedges with a budget and a host whose requests take so long."""
    hedges = Hedges(share=share)
    teach(hedges, HOST, SIZE, requests=requests, duration_s=duration_s)
    return hedges


def teach(hedges: Hedges, host: str, size_bytes: int, *, requests: int, duration_s: float) -> None:
    """Let so many requests be over that took so long."""
    for _ in range(requests):
        hedges.started(size_bytes)
        hedges.ended(host, size_bytes, duration_s)


@given(sizes=st.lists(st.integers(1, 10**6), max_size=300), share=st.floats(0, 0.3))
def test_second_requests_never_take_more_than_their_share_of_requests_or_of_bytes(
    sizes: list[int], share: float
) -> None:
    hedges = Hedges(share=share)
    for size_bytes in sizes:
        hedges.started(size_bytes)
        hedges.take(HOST, size_bytes, now_s=0.0)
        found = hedges.statistics()
        assert found.hedges <= share * found.requests
        assert found.hedged_bytes <= share * found.size_bytes


def test_a_request_is_late_when_it_takes_longer_than_95_of_100_did() -> None:
    hedges = Hedges()
    for number in range(100):
        hedges.ended(HOST, SIZE, float(number))
    assert hedges.late_s(HOST, SIZE) == 95
    assert hedges.late_s(HOST, 10 * SIZE) is None, "of another length, nothing is known"
    assert hedges.late_s("s3://other", SIZE) is None


def test_nothing_is_late_before_enough_is_known() -> None:
    hedges = Hedges()
    for _ in range(LEAST_KNOWN - 1):
        hedges.ended(HOST, SIZE, 1.0)
    assert hedges.late_s(HOST, SIZE) is None


def test_a_host_that_asked_to_slow_down_is_not_asked_twice_for_a_while() -> None:
    hedges = known()
    hedges.throttled(HOST, now_s=100.0)
    assert not hedges.take(HOST, SIZE, now_s=101.0)
    assert hedges.take("s3://other", SIZE, now_s=101.0)
    assert hedges.take(HOST, SIZE, now_s=1000.0)


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="hedge_share=5"):
        Hedges(share=5)


class Scripted:
    """Answers in turn: a number of seconds to wait, or an error."""

    def __init__(self, *script: float | Exception) -> None:
        self._script = list(script)
        self.begun = 0
        self.cancelled = 0

    async def read(self) -> int:
        self.begun += 1
        number, step = self.begun, self._script[self.begun - 1]
        try:
            if isinstance(step, Exception):
                await asyncio.sleep(0.05)
                raise step
            await asyncio.sleep(step)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return number


async def test_what_is_late_is_asked_a_second_time_and_the_loser_is_cancelled() -> None:
    hedges, origin = known(), Scripted(60.0, 0.0)
    assert await hedges.run(origin.read, host=HOST, size_bytes=SIZE) == 2
    assert (origin.begun, origin.cancelled) == (2, 1)
    assert hedges.statistics().won == 1


async def test_a_second_request_that_fails_does_not_spoil_the_first() -> None:
    hedges, origin = known(), Scripted(0.5, OriginUnavailable("refused"))
    assert await hedges.run(origin.read, host=HOST, size_bytes=SIZE) == 1
    assert origin.begun == 2


async def test_the_error_of_both_is_an_error() -> None:
    hedges, origin = known(), Scripted(OriginUnavailable("one"), OriginUnavailable("two"))
    with pytest.raises(OriginUnavailable):
        await hedges.run(origin.read, host=HOST, size_bytes=SIZE)


async def test_a_call_that_is_cancelled_leaves_no_request_behind() -> None:
    hedges, origin = known(), Scripted(60.0, 60.0)
    task = asyncio.create_task(hedges.run(origin.read, host=HOST, size_bytes=SIZE))
    while origin.begun < 2:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert origin.cancelled == 2


@pytest.mark.timeout(300)
async def test_a_heavy_tail_is_cut_off_at_a_cost_of_five_in_a_hundred_requests(
    s3_server: SeaweedServer, s3: Any, bucket: str, prefix: str
) -> None:
    """One answer in thirty takes long. Counted, not timed: how many shards had no other answer than such a one."""
    body = random.Random(1).randbytes(20_000)
    put = s3.put_object(Bucket=bucket, Key=f"{prefix}object", Body=body)
    info = ObjectInfo(uri=f"s3://{bucket}/{prefix}object", size_bytes=len(body), version=put["ETag"])
    proxy = FaultProxy(s3_server.port)
    proxy.start()
    origin = open_origin(info.uri, storage_options=storage_options(proxy.url))
    limits = TransferLimits(part_bytes=len(body), timeout_floor_s=60.0)
    waits_s: list[float] = []
    try:
        held_up = {}
        for share in (0.0, 0.05):
            slots = TransferSlots(hedge_share=share)
            # What the machine makes a little late shall not use up the second requests.
            teach(slots.hedges, origin.origin_id, len(body), requests=LEAST_KNOWN, duration_s=0.25)
            draw = heavy_tail(7, typical_s=0.002, slow_s=[0.8], slow_share=1 / 30)
            proxy.latency_of = lambda draw=draw: waits_s.append(draw()) or waits_s[-1]
            held_up[share] = 0
            for _ in range(150):
                waits_s.clear()
                await copy(origin, info, limits, slots)
                held_up[share] += min(waits_s) == 0.8
            found = slots.statistics().hedges
            assert found.hedges <= share * found.requests
            assert found.requests == LEAST_KNOWN + 150
        assert held_up[0.0] >= 3
        assert held_up[0.05] < held_up[0.0]
    finally:
        await origin.aclose()
        proxy.stop()


async def copy(origin: Any, info: ObjectInfo, limits: TransferLimits, slots: TransferSlots) -> None:
    async def write_at(offset: int, body: Any) -> None:
        assert memoryview(body).nbytes == info.size_bytes
        assert offset == 0

    await transfer(origin, info, write_at, limits=limits, slots=slots)
