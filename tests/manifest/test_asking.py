from __future__ import annotations

import asyncio

import pytest

from cacheloader.errors import (
    OriginChanged,
    OriginDenied,
    OriginNotFound,
    OriginThrottled,
    OriginTimeout,
    OriginUnavailable,
)
from cacheloader.manifest.asking import PatientOrigin, ask_each
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.retry import Backoff
from cacheloader.origin.transfer import TransferLimits
from tests.support.memory_origin import MemoryOrigin
from tests.support.virtual_time import virtual_time

URI = "mem://bucket/d/a.tar"
QUICK = TransferLimits(timeout_floor_s=0.1, deadline_s=0.2, backoff=Backoff(first_s=0.01))


def store() -> MemoryOrigin:
    return MemoryOrigin({URI: b"0123456789", "mem://bucket/d/b.tar": b""})


async def everything(origin: PatientOrigin) -> list[ObjectInfo]:
    return await origin.search("mem://bucket/d/", keep=lambda _: True, seen=lambda _: None)


@pytest.mark.parametrize("error", [OriginThrottled("slow down"), OriginUnavailable("away"), OriginTimeout("late")])
@pytest.mark.parametrize("verb", ["stat", "list", "read"])
async def test_a_question_that_may_be_answered_later_is_asked_again(verb, error):
    origin = store()
    patient = PatientOrigin(origin)
    info = await patient.stat(URI)
    origin.fail(error, verb=verb, times=2)
    if verb == "stat":
        assert await patient.stat(URI) == info
    elif verb == "list":
        assert [found.uri for found in await everything(patient)] == [URI, "mem://bucket/d/b.tar"]
    else:
        assert await patient.read(info, 2, 5) == b"234"


@pytest.mark.parametrize("error", [OriginDenied("no"), OriginNotFound("none"), OriginChanged("other")])
async def test_a_final_answer_is_not_asked_for_again(error):
    origin = store()
    origin.fail(error, times=5)
    with pytest.raises(type(error)):
        await PatientOrigin(origin).stat(URI)
    assert origin.asked["stat", URI] == 1


async def test_a_store_that_never_answered_is_given_up_soon_with_its_own_words():
    origin = store()
    origin.fail(OriginUnavailable("connection refused"), times=1000)
    with virtual_time() as clock:
        begun_s = clock()
        with pytest.raises(OriginUnavailable, match="connection refused"):
            await PatientOrigin(origin, stranger=QUICK).stat(URI)
        assert clock() - begun_s <= QUICK.deadline_s


async def test_a_store_that_has_answered_is_waited_for_longer():
    origin = store()
    patient = PatientOrigin(origin, stranger=TransferLimits(deadline_s=0.001))
    with virtual_time():
        await patient.stat(URI)
        origin.fail(OriginUnavailable("away"), times=2)
        assert (await patient.stat(URI)).uri == URI


class SilentOrigin(MemoryOrigin):
    """Never answers, and knows whether it was left alone."""

    cancelled = 0

    async def _question(self, verb: str, uri: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1


@pytest.mark.parametrize("verb", ["stat", "list"])
async def test_a_store_that_says_nothing_is_a_timeout_that_names_the_uri(verb):
    origin = SilentOrigin({})
    patient = PatientOrigin(origin, stranger=QUICK)
    with (
        virtual_time(),
        pytest.raises(OriginTimeout, match=r"ing mem://bucket/d/.* no answer in 0.1 s; check the network"),
    ):
        await (patient.stat(URI) if verb == "stat" else everything(patient))
    assert origin.cancelled >= 1


async def test_a_listing_may_take_long_as_long_as_it_moves():
    class SlowListing(MemoryOrigin):
        async def list(self, prefix: str):
            for i in range(3001):
                if i % 500 == 0:
                    await asyncio.sleep(0.3)
                yield ObjectInfo(uri=f"{prefix}{i:04d}", size_bytes=0, version="")

    patient = PatientOrigin(SlowListing({}), stranger=TransferLimits(timeout_floor_s=1.5))
    with virtual_time() as clock:
        begun_s = clock()
        assert len(await everything(patient)) == 3001
        assert clock() - begun_s > 1.5, "longer than any silence may be"


async def test_a_listing_that_stops_early_is_closed():
    closed = asyncio.Event()

    class Endless(MemoryOrigin):
        async def list(self, prefix: str):
            try:
                while True:
                    yield ObjectInfo(uri=f"{prefix}x", size_bytes=0, version="")
            finally:
                closed.set()

    found = await PatientOrigin(Endless({})).search(
        "mem://bucket/d/", keep=lambda _: True, seen=lambda _: None, stop_after=10
    )
    assert len(found) == 1
    assert closed.is_set()


async def test_a_long_read_is_put_together_from_parts():
    origin = store()
    patient = PatientOrigin(origin, familiar=TransferLimits(part_bytes=3))
    info = await patient.stat(URI)
    assert await patient.read(info, 1, 9) == b"12345678"
    assert await patient.read(info, 5, 5) == b""
    assert origin.asked["read", URI] == 3


async def test_a_read_is_of_the_version_that_was_described():
    origin = store()
    patient = PatientOrigin(origin)
    info = await patient.stat(URI)
    origin.objects[URI] = b"9876543210"
    with pytest.raises(OriginChanged):
        await patient.read(info, 0, 10)


async def test_answers_come_in_the_order_of_the_questions():
    async def question(number: int) -> int:
        await asyncio.sleep(0 if number % 3 else 0.001)
        return number * number

    done: list[int] = []
    answers = await ask_each(range(20), question, in_flight=4, progress=done.append)
    assert answers == [number * number for number in range(20)]
    assert done == list(range(1, 21))
    assert await ask_each([], question, in_flight=4) == []


async def test_the_first_failure_ends_the_others_and_keeps_its_cause():
    started: list[int] = []
    ended: list[int] = []

    async def question(number: int) -> None:
        started.append(number)
        try:
            if number == 3:
                raise OriginDenied("no") from ValueError("the cause")
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    with pytest.raises(OriginDenied) as caught:
        await ask_each(range(100), question, in_flight=8)
    assert isinstance(caught.value.__cause__, ValueError)
    assert sorted(started) == sorted(ended)
    assert len(started) <= 8
