"""Transfers from a real S3 server, through a proxy that breaks what the test says."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cacheloader.errors import (
    ConfigError,
    OriginChanged,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginShortBody,
    OriginThrottled,
    OriginTimeout,
    OriginUnavailable,
)
from cacheloader.keys import ByteRange
from cacheloader.manifest.asking import PatientOrigin
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.open import open_origin
from cacheloader.origin.retry import Backoff
from cacheloader.origin.slots import TransferSlots, Urgency
from cacheloader.origin.transfer import TransferLimits, transfer, with_retries
from tests.support.counting_proxy import CountingProxy, Fault
from tests.support.loop_clock import LoopClock
from tests.support.seaweedfs import storage_options
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheloader.origin.base import Bytes, Origin

PART = 128 * 1024
BODY = random.Random(5).randbytes(10 * PART + 123)
QUICK = Backoff(first_s=0.01, longest_s=0.05)
# No machine pauses for as long as these; what a test wants to see end has limits of its own.
LIMITS = TransferLimits(part_bytes=PART, max_parallel=4, backoff=QUICK, timeout_floor_s=60.0, deadline_s=60.0)


class Sink:
    """Takes the parts of one object and knows which bytes came how often."""

    def __init__(self, size_bytes: int) -> None:
        self.body = bytearray(size_bytes)
        self.parts: list[ByteRange] = []

    async def write_at(self, offset_bytes: int, body: Bytes) -> None:
        view = memoryview(body)
        self.body[offset_bytes : offset_bytes + len(view)] = view
        self.parts.append(ByteRange(start=offset_bytes, stop=offset_bytes + len(view)))

    def covered_once(self) -> bool:
        edges = sorted((part.start, part.stop) for part in self.parts)
        return [0, *(stop for _, stop in edges)] == [*(start for start, _ in edges), len(self.body)]


@pytest.fixture
def slots() -> TransferSlots:
    return TransferSlots(max_bytes=8 * PART, max_requests=8, backoff=QUICK)


@pytest.fixture(params=["obstore", "fsspec"])
async def origin(request: pytest.FixtureRequest, s3_proxy: CountingProxy, bucket: str) -> AsyncIterator[Origin]:
    options = storage_options(s3_proxy.url)
    origin = open_origin(f"s3://{bucket}/", storage_options=options, engine=request.param)
    yield origin
    await origin.aclose()


@pytest.fixture
async def info(origin: Origin, s3: Any, bucket: str, prefix: str, s3_proxy: CountingProxy) -> ObjectInfo:
    s3.put_object(Bucket=bucket, Key=f"{prefix}object", Body=BODY)
    info = await origin.stat(f"s3://{bucket}/{prefix}object")
    s3_proxy.reset()
    return info


async def copy(origin: Origin, info: ObjectInfo, slots: TransferSlots, limits: TransferLimits = LIMITS) -> Sink:
    sink = Sink(info.size_bytes)
    await transfer(origin, info, sink.write_at, limits=limits, slots=slots)
    return sink


def answer_no_sooner_than(proxy: CountingProxy, num_requests: int) -> None:
    """Let ``proxy`` answer nothing before so many requests are there at once, however slowly they come."""
    delay = proxy._delay

    async def wait_for_the_others(method: str, target: str) -> None:
        while proxy.peak_in_flight < num_requests:
            await asyncio.sleep(0.005)
        await delay(method, target)

    proxy._delay = wait_for_the_others  # type: ignore[method-assign]


async def test_an_object_arrives_whole_each_byte_once_and_each_byte_asked_for_once(
    origin: Origin, info: ObjectInfo, slots: TransferSlots, s3_proxy: CountingProxy
):
    sink = await copy(origin, info, slots)
    assert sink.body == BODY
    assert sink.covered_once()
    await until(lambda: s3_proxy.in_flight == 0)
    assert s3_proxy.body_bytes().total() == len(BODY)
    assert len(s3_proxy.reads()) == 11


async def test_parts_run_in_parallel_and_never_more_than_allowed(
    origin: Origin, info: ObjectInfo, slots: TransferSlots, s3_proxy: CountingProxy
):
    s3_proxy.latency_s = 0.05
    answer_no_sooner_than(s3_proxy, LIMITS.max_parallel)
    await copy(origin, info, slots)
    assert s3_proxy.peak_in_flight == LIMITS.max_parallel


async def test_two_transfers_share_one_budget(origin: Origin, info: ObjectInfo, s3_proxy: CountingProxy):
    s3_proxy.latency_s = 0.05
    answer_no_sooner_than(s3_proxy, 3)
    shared = TransferSlots(max_requests=3)
    await asyncio.gather(copy(origin, info, shared), copy(origin, info, shared))
    assert s3_proxy.peak_in_flight == 3


@pytest.mark.parametrize(
    "fault",
    [
        Fault(action="status", times=5, status=503, code="SlowDown"),
        Fault(action="status", times=5, status=500, code="InternalError"),
        Fault(action="reset", times=5, after_bytes=PART // 2),
        Fault(action="close", times=5, after_bytes=PART // 2),
        Fault(action="reset", times=5, after_bytes=0),
        Fault(action="shorten", times=5, after_bytes=PART // 2),
    ],
    ids=lambda fault: f"{fault.action}-{fault.status}-{fault.after_bytes}",
)
async def test_failures_that_pass_are_survived(
    origin: Origin, info: ObjectInfo, slots: TransferSlots, s3_proxy: CountingProxy, fault: Fault
):
    s3_proxy.inject(fault)
    sink = await copy(origin, info, slots)
    assert sink.body == BODY
    assert sink.covered_once()
    await until(lambda: s3_proxy.in_flight == 0)
    assert len(s3_proxy.reads()) == 16, "each of the five failures costs one request more"


async def test_a_stalled_body_is_given_up_at_its_deadline_and_asked_for_again(
    origin: Origin, info: ObjectInfo, slots: TransferSlots, s3_proxy: CountingProxy
):
    s3_proxy.inject(Fault(action="stall", times=2, after_bytes=1000))
    limits = TransferLimits(part_bytes=PART, backoff=QUICK, timeout_floor_s=0.5, slowest_bytes_per_s=PART * 2)
    sink = await copy(origin, info, slots, limits)
    assert sink.body == BODY
    await until(lambda: s3_proxy.in_flight == 0)


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (Fault(action="status", status=503, code="SlowDown"), OriginThrottled, "503 SlowDown"),
        (Fault(action="status", status=500, code="InternalError"), OriginUnavailable, "500 InternalError"),
        (Fault(action="shorten", after_bytes=7), OriginShortBody, "7 bytes came back"),
        (Fault(action="stall", after_bytes=7), OriginTimeout, "no answer in 0."),
        (Fault(action="reset", after_bytes=7), OriginUnavailable, "failed: "),
    ],
    ids=["slow-down", "internal-error", "short", "stall", "reset"],
)
async def test_failures_that_stay_end_at_the_deadline_with_the_last_cause(
    origin: Origin,
    info: ObjectInfo,
    slots: TransferSlots,
    s3_proxy: CountingProxy,
    fault: Fault,
    kind: type[OriginError],
    says: str,
):
    s3_proxy.inject(fault)
    floor_s = 0.2 if fault.action == "stall" else 60.0
    limits = TransferLimits(
        part_bytes=PART, backoff=QUICK, timeout_floor_s=floor_s, slowest_bytes_per_s=10 * PART, deadline_s=0.6
    )
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    with pytest.raises(OriginError, match="given up after") as raised:
        await copy(origin, info, slots, limits)
    assert type(raised.value) is kind
    assert says in str(raised.value)
    assert info.uri in str(raised.value)
    assert raised.value.uri == info.uri
    assert clock() - begun_s < 60, "a transfer's own limits would have it go on for minutes"
    await until(lambda: s3_proxy.in_flight == 0)
    assert slots.statistics().requests == 0


async def test_a_changed_object_ends_the_transfer_at_once(
    origin: Origin, info: ObjectInfo, slots: TransferSlots, s3_proxy: CountingProxy, s3: Any
):
    _, _, bucket, key = info.uri.split("/", 3)
    s3.put_object(Bucket=bucket, Key=key, Body=BODY[::-1])
    with pytest.raises(OriginChanged):
        await copy(origin, info, slots)
    assert len(s3_proxy.reads()) <= LIMITS.max_parallel


async def test_an_object_that_changes_in_mid_transfer_never_gives_mixed_bytes(
    origin: Origin, info: ObjectInfo, slots: TransferSlots, s3: Any
):
    _, _, bucket, key = info.uri.split("/", 3)
    sink = Sink(info.size_bytes)

    async def write_at(offset_bytes: int, body: Bytes) -> None:
        if not sink.parts:
            await asyncio.to_thread(s3.put_object, Bucket=bucket, Key=key, Body=BODY[::-1])
        await sink.write_at(offset_bytes, body)

    with pytest.raises(OriginChanged):
        await transfer(origin, info, write_at, limits=LIMITS, slots=slots)
    for part in sink.parts:
        assert sink.body[part.start : part.stop] == BODY[part.start : part.stop]


async def test_a_denied_part_cancels_the_others_at_once(
    origin: Origin, info: ObjectInfo, slots: TransferSlots, s3_proxy: CountingProxy
):
    s3_proxy.inject(
        Fault(action="status", times=1, status=403, code="AccessDenied"), Fault(action="stall", after_bytes=10)
    )
    endless = msgspec.structs.replace(LIMITS, timeout_floor_s=3600.0, deadline_s=3600.0)
    async with asyncio.timeout(60):
        with pytest.raises(OriginDenied, match="403 AccessDenied") as raised:
            await copy(origin, info, slots, endless)
    assert "given up" not in str(raised.value)
    await until(lambda: s3_proxy.in_flight == 0)
    assert slots.statistics().requests == 0


async def test_what_the_sink_raises_ends_the_transfer_as_it_is(origin: Origin, info: ObjectInfo, slots: TransferSlots):
    async def full(offset_bytes: int, body: Bytes) -> None:
        raise OSError(28, "no space left on device")

    with pytest.raises(OSError, match="no space left"):
        await transfer(origin, info, full, limits=LIMITS, slots=slots)
    assert slots.statistics().requests == 0


async def test_cancelling_a_transfer_leaves_no_request_behind(
    origin: Origin, info: ObjectInfo, slots: TransferSlots, s3_proxy: CountingProxy
):
    s3_proxy.inject(Fault(action="stall", after_bytes=1000))
    task = asyncio.create_task(copy(origin, info, slots))
    await until(lambda: s3_proxy.in_flight == LIMITS.max_parallel)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: s3_proxy.in_flight == 0)
    assert slots.statistics().requests == 0


async def test_a_slow_down_slows_all_transfers_from_the_host(origin: Origin, info: ObjectInfo, s3_proxy: CountingProxy):
    slots = TransferSlots(max_requests=8, backoff=QUICK)
    s3_proxy.inject(Fault(action="status", times=8, status=503, code="SlowDown"))
    sinks = await asyncio.gather(copy(origin, info, slots), copy(origin, info, slots))
    assert all(sink.body == BODY for sink in sinks)
    assert slots.statistics().throttled_total == 8
    assert slots._pace(origin.origin_id).allowed < 8, "it has not yet earned back what it lost"


async def test_an_object_of_no_bytes_writes_nothing_but_has_to_be_the_right_version(
    origin: Origin, s3: Any, bucket: str, prefix: str, slots: TransferSlots
):
    s3.put_object(Bucket=bucket, Key=f"{prefix}empty", Body=b"")
    info = await origin.stat(f"s3://{bucket}/{prefix}empty")
    assert (await copy(origin, info, slots)).parts == []
    other = ObjectInfo(uri=info.uri, size_bytes=0, version='"another"')
    with pytest.raises(OriginChanged):
        await copy(origin, other, slots)


async def test_demand_overtakes_a_prefetch_that_is_under_way(origin: Origin, info: ObjectInfo, s3_proxy: CountingProxy):
    slots = TransferSlots(max_requests=1)
    s3_proxy.latency_s = 0.01
    order: list[str] = []

    async def fetch(name: str, urgency: Urgency) -> None:
        async def write_at(offset_bytes: int, body: Bytes) -> None:
            order.append(name)

        await transfer(origin, info, write_at, limits=LIMITS, slots=slots, urgency=urgency)

    prefetch = asyncio.create_task(fetch("prefetch", Urgency()))
    await until(lambda: "prefetch" in order)
    await fetch("demand", Urgency(demanded=True))
    done = order.index("demand"), len(order)
    await prefetch
    assert order[slice(*done)].count("prefetch") == 0
    assert order.count("prefetch") == order.count("demand") == 11


async def test_listing_survives_a_failing_page_and_is_sorted(
    origin: Origin, s3: Any, bucket: str, prefix: str, s3_proxy: CountingProxy
):
    for name in ("b/a", "a-b", "a/b", "a"):
        s3.put_object(Bucket=bucket, Key=f"{prefix}{name}", Body=b"x")
    s3_proxy.inject(Fault(action="status", times=1, status=500, code="InternalError"))
    patient = PatientOrigin(origin, stranger=LIMITS)
    found = await patient.search(f"s3://{bucket}/{prefix}", keep=lambda _: True, seen=lambda _: None)
    assert [info.uri.removeprefix(f"s3://{bucket}/{prefix}") for info in found] == ["a", "a-b", "a/b", "b/a"]


async def test_a_silent_listing_is_given_up(origin: Origin, bucket: str, prefix: str, s3_proxy: CountingProxy):
    s3_proxy.inject(Fault(action="stall", after_bytes=0))
    limits = TransferLimits(timeout_floor_s=0.2, deadline_s=0.5, backoff=QUICK)
    patient = PatientOrigin(origin, stranger=limits)
    async with asyncio.timeout(60):
        with pytest.raises(OriginTimeout, match=r"listing s3://.* no answer in 0.2 s"):
            await patient.search(f"s3://{bucket}/{prefix}", keep=lambda _: True, seen=lambda _: None)


class _Busy:
    """A store whose one object fails and whose other one comes, each when it is told to."""

    origin_id = "busy"

    def __init__(self) -> None:
        self.may_end = {"failing": asyncio.Event(), "slow": asyncio.Event()}

    async def read_range(self, uri: str, byte_range: ByteRange, *, version: str) -> Bytes:
        name = uri.rpartition("/")[2]
        await self.may_end[name].wait()
        if name == "failing":
            raise OriginUnavailable("503: the real cause", uri=uri)
        return bytes(byte_range.size_bytes)


async def test_a_wait_for_a_slot_that_takes_the_rest_of_the_time_does_not_hide_the_cause():
    """1. A try fails. 2. Another transfer has the only slot until the deadline is over. 3. The failure is told."""
    busy: Any = _Busy()
    slots = TransferSlots(max_requests=1)
    limits = TransferLimits(deadline_s=1.5, timeout_floor_s=0.5, backoff=QUICK)
    sink = Sink(10)

    async def fetch(name: str, *, limits: TransferLimits, demanded: bool) -> None:
        info = ObjectInfo(uri=f"s3://b/{name}", size_bytes=10, version="")
        await transfer(busy, info, sink.write_at, limits=limits, slots=slots, urgency=Urgency(demanded=demanded))

    with LoopClock() as clock:
        failing = asyncio.create_task(fetch("failing", limits=limits, demanded=False))
        await clock.until(lambda: slots.statistics().requests == 1)
        slow = asyncio.create_task(fetch("slow", limits=LIMITS, demanded=True))
        await clock.until(lambda: slots.statistics().waiting == 1)
        busy.may_end["failing"].set()
        await clock.until(lambda: slots.statistics().waiting == 0)
        clock.advance(QUICK.first_s)
        await clock.until(lambda: slots.statistics().waiting == 1)
        clock.advance(limits.deadline_s)
        busy.may_end["slow"].set()
        await clock.until(failing.done)
    with pytest.raises(OriginUnavailable, match=r"503: the real cause.*given up after 1 try") as raised:
        await failing
    assert "no answer in" not in str(raised.value)
    await slow


async def test_tries_that_hang_end_at_the_overall_deadline_not_a_try_later(
    origin: Origin, bucket: str, prefix: str, s3_proxy: CountingProxy
):
    s3_proxy.latency_s = 3600.0
    uri = f"s3://{bucket}/{prefix}x"
    limits = TransferLimits(timeout_floor_s=3.0, deadline_s=4.0, backoff=Backoff(first_s=0.0))
    with LoopClock() as clock:
        asked = asyncio.create_task(with_retries(lambda: origin.stat(uri), action="describing", uri=uri, limits=limits))
        await clock.until(lambda: s3_proxy.in_flight == 1)
        clock.advance(3.0)
        await clock.until(lambda: s3_proxy.in_flight == 2)
        clock.advance(0.999)
        await clock.settle()
        assert not asked.done()
        clock.advance(0.001)
        await clock.until(asked.done)
    with pytest.raises(OriginTimeout, match=r"no answer in 1 s;.* \(given up after 2 tries in 4\.0 s\)"):
        await asked


async def test_what_is_not_found_is_not_asked_for_again(
    origin: Origin, bucket: str, prefix: str, s3_proxy: CountingProxy
):
    uri = f"s3://{bucket}/{prefix}missing"
    with pytest.raises(OriginNotFound):
        await with_retries(lambda: origin.stat(uri), action="describing", uri=uri, limits=LIMITS)
    assert len(s3_proxy.exchanges) == 1


@pytest.mark.parametrize("name", ["part_bytes", "max_parallel", "timeout_floor_s", "deadline_s"])
def test_limits_of_nothing_are_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name}=0 must be more than 0"):
        TransferLimits(**{name: 0})


def test_a_request_has_time_for_its_size_but_never_less_than_the_floor():
    limits = TransferLimits(timeout_floor_s=10, slowest_bytes_per_s=1000)
    assert limits.timeout_s(1) == 10
    assert limits.timeout_s(60_000) == 60
