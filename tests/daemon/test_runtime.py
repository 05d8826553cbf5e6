"""The runtime between a real planner and a fetcher whose timing the test decides: races, defects, lost blobs."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import pytest
from cacheloader_daemon.account import Account
from cacheloader_daemon.lease import ShardLease
from cacheloader_daemon.plan.machine import Planner
from cacheloader_daemon.plan.options import PlannerOptions
from cacheloader_daemon.runtime import Runtime
from cacheloader_daemon.shards import Dataset
from cacheloader_daemon.store import BlobLost, DiskTrouble

from cacheloader.errors import (
    CacheloaderError,
    DaemonError,
    DatasetError,
    OriginDenied,
    OriginNotFound,
    ProtocolError,
    QuotaTooSmall,
)
from cacheloader.manifest.record import Manifest, ShardInfo
from cacheloader.protocol.plans import Accesses
from tests.support.descriptors import open_files, opened_since
from tests.support.scripted_fetcher import ScriptedFetcher, memory_lease
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheloader_daemon.fetch import Fetcher

    from cacheloader.origin.base import Origin

SHARD_BYTES = 1000


@dataclass
class Stage:
    """A runtime, its parts, and one data set of six shards."""

    runtime: Runtime
    planner: Planner
    fetcher: ScriptedFetcher
    dataset: Dataset
    outcomes: list[ShardLease | CacheloaderError] = field(default_factory=list)

    def key(self, shard: int) -> bytes:
        return self.dataset.shards[shard].key

    async def ended(self, name: str, shard: int, outcome: object) -> None:
        """Wait for a call of the fetcher, and let it end."""
        await until(lambda: (name, self.key(shard)) in self.fetcher.calls)
        self.fetcher.end(name, self.key(shard), outcome)
        await asyncio.sleep(0)

    async def delivered(self, number: int) -> ShardLease | CacheloaderError:
        await until(lambda: len(self.outcomes) > number)
        return self.outcomes[number]


def dataset(num_shards: int = 6, *, origin: object = None) -> Dataset:
    rows = [
        ShardInfo(uri=f"s3://b/{n}.tar", size_bytes=SHARD_BYTES, version="1", num_samples=10) for n in range(num_shards)
    ]
    manifest = Manifest.build(rows, format="webdataset", origin_id="s3://b")
    return Dataset(manifest, cast("Origin", origin), reserve_bytes=lambda size_bytes: size_bytes)


@asynccontextmanager
async def staged(
    *, shards_that_fit: int = 6, patience_s: float = 600.0, max_memory_bytes: int = 100 * SHARD_BYTES
) -> AsyncIterator[Stage]:
    planner = Planner(PlannerOptions(quota_bytes=shards_that_fit * SHARD_BYTES, patience_s=patience_s, retry_s=0.01))
    fetcher = ScriptedFetcher()
    before = open_files()
    async with asyncio.TaskGroup() as tasks:
        runtime = Runtime(
            planner=planner,
            fetcher=cast("Fetcher", fetcher),
            account=Account(),
            tasks=tasks,
            max_memory_bytes=max_memory_bytes,
        )
        stage = Stage(runtime, planner, fetcher, dataset())
        yield stage
        planner.check_invariants()
        runtime.stop()
    for outcome in stage.outcomes:
        if isinstance(outcome, ShardLease):
            outcome.close()
    await until(lambda: not opened_since(before))


async def test_a_demand_is_fetched_leased_and_delivered() -> None:
    async with staged() as stage:
        session = stage.runtime.open_session(stage.dataset)
        stage.runtime.demand(session, 2, stage.outcomes.append)
        await stage.ended("demand", 2, SHARD_BYTES)
        await stage.ended("lease", 2, memory_lease())
        assert isinstance(await stage.delivered(0), ShardLease)
        assert stage.planner.statistics().leased_shards == 1
        stage.runtime.release(session, 2)
        assert stage.planner.statistics().leased_shards == 0
        with pytest.raises(ProtocolError, match="released more often"):
            stage.runtime.release(session, 2)


async def test_a_lease_that_comes_after_its_client_left_is_closed() -> None:
    """1. A shard is asked for. 2. Its blob is being opened. 3. The client leaves. 4. The blob is open."""
    async with staged() as stage:
        session = stage.runtime.open_session(stage.dataset)
        stage.runtime.demand(session, 0, stage.outcomes.append)
        await stage.ended("demand", 0, SHARD_BYTES)
        await until(lambda: ("lease", stage.key(0)) in stage.fetcher.calls)
        stage.runtime.close_session(session)
        await stage.ended("lease", 0, memory_lease())
        assert stage.outcomes == []
        assert stage.planner.statistics().leased_shards == 0


async def test_a_fetch_goes_on_when_the_client_that_wanted_it_leaves_and_serves_the_next() -> None:
    async with staged() as stage:
        first = stage.runtime.open_session(stage.dataset)
        second = stage.runtime.open_session(stage.dataset)
        stage.runtime.demand(first, 0, stage.outcomes.append)
        await until(lambda: ("demand", stage.key(0)) in stage.fetcher.calls)
        stage.runtime.demand(second, 0, stage.outcomes.append)
        stage.runtime.close_session(first)
        await stage.ended("demand", 0, SHARD_BYTES)
        await stage.ended("lease", 0, memory_lease())
        assert isinstance(await stage.delivered(0), ShardLease)
        assert stage.fetcher.log == [("demand", stage.key(0)), ("lease", stage.key(0))]


async def test_an_error_of_the_origin_reaches_everybody_who_waits() -> None:
    async with staged() as stage:
        for _ in range(3):
            stage.runtime.demand(stage.runtime.open_session(stage.dataset), 1, stage.outcomes.append)
        error = OriginNotFound("s3://b/1.tar does not exist")
        await stage.ended("demand", 1, error)
        await stage.delivered(2)
        assert stage.outcomes == [error] * 3
        assert stage.runtime.account.fetch_failures == {"OriginNotFound": 1}


async def test_a_defect_in_a_fetch_is_told_and_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async with staged() as stage:
        stage.runtime.demand(stage.runtime.open_session(stage.dataset), 1, stage.outcomes.append)
        await stage.ended("demand", 1, ZeroDivisionError("a defect"))
        error = await stage.delivered(0)
        assert isinstance(error, DaemonError)
        assert "s3://b/1.tar" in error.message
        assert "ZeroDivisionError" in error.message
    assert "Traceback" in caplog.text


async def test_a_fetch_uses_the_rights_of_who_waits_for_it_and_those_of_others_only_where_they_are_denied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. One of three waits and its fetch is denied. 2. Another comes to wait. 3. The third has newer credentials."""
    async with staged() as stage:
        datasets = [dataset(origin=name) for name in ("first", "second", "third")]
        sessions = [stage.runtime.open_session(one) for one in datasets]
        for attempt in range(2):
            stage.runtime.demand(sessions[0], 1, stage.outcomes.append)
            await until(lambda: ("demand", stage.key(1)) in stage.fetcher.calls)
            stage.runtime.demand(sessions[1], 1, stage.outcomes.append)
            stage.fetcher.end("demand", stage.key(1), OriginDenied("first is denied"))
            await until(lambda: ("demand", stage.key(1)) in stage.fetcher.calls)
            assert stage.fetcher.origins == ["first", "second"]
            stage.fetcher.end("demand", stage.key(1), OriginDenied("second is denied"))
            await until(lambda: ("demand", stage.key(1)) in stage.fetcher.calls)
            assert stage.fetcher.origins == ["first", "second", "third"]
            stage.fetcher.origins.clear()
            if attempt == 0:
                stage.fetcher.end("demand", stage.key(1), OriginDenied("third is denied"))
                await stage.delivered(1)
                assert [str(outcome) for outcome in stage.outcomes] == ["first is denied"] * 2
        await stage.ended("demand", 1, SHARD_BYTES)
        await until(lambda: ("lease 1", stage.key(1)) in stage.fetcher.calls)
        await stage.ended("lease 1", 1, memory_lease())
        await stage.ended("lease", 1, memory_lease())
        assert isinstance(await stage.delivered(3), ShardLease)
        assert "s3://b/1.tar could not be fetched: second is denied" in caplog.text


async def test_a_prefetch_uses_the_newest_credentials() -> None:
    async with staged() as stage:
        sessions = [stage.runtime.open_session(dataset(origin=name)) for name in ("expired", "fresh")]
        first = np.zeros(1, dtype=np.int64)
        accesses = Accesses(first_clock=first, stop_clock=first + 10, shard=np.array([2], dtype=np.int32))
        stage.runtime.follow(sessions[0], accesses, clock=0)
        await stage.ended("prefetch", 2, SHARD_BYTES)
        assert stage.fetcher.origins == ["fresh"]


async def test_a_defect_in_opening_a_blob_is_told_and_not_waited_for() -> None:
    async with staged() as stage:
        stage.runtime.demand(stage.runtime.open_session(stage.dataset), 1, stage.outcomes.append)
        await stage.ended("demand", 1, SHARD_BYTES)
        await stage.ended("lease", 1, ZeroDivisionError("a defect"))
        error = await stage.delivered(0)
        assert isinstance(error, DaemonError)
        assert "ZeroDivisionError" in error.message
        assert stage.planner.statistics().leased_shards == 0


async def test_an_answer_that_meets_a_defect_costs_the_others_nothing() -> None:
    async with staged() as stage:

        def broken(outcome: object) -> None:
            raise ZeroDivisionError("a defect")

        for deliver in (broken, stage.outcomes.append):
            stage.runtime.demand(stage.runtime.open_session(stage.dataset), 1, deliver)
        await stage.ended("demand", 1, OriginNotFound("s3://b/1.tar does not exist"))
        assert isinstance(await stage.delivered(0), OriginNotFound)
        for deliver in (broken, stage.outcomes.append):
            stage.runtime.demand(stage.runtime.open_session(stage.dataset), 2, deliver)
        await stage.ended("demand", 2, DiskTrouble(28, "no space", "blobs"))
        await stage.ended("memory", 2, OriginNotFound("s3://b/2.tar does not exist"))
        assert isinstance(await stage.delivered(1), OriginNotFound)


async def test_who_gets_no_descriptor_of_a_shard_in_memory_is_told() -> None:
    async with staged() as stage:
        for _ in range(2):
            stage.runtime.demand(stage.runtime.open_session(stage.dataset), 1, stage.outcomes.append)
        await stage.ended("demand", 1, DiskTrouble(28, "no space", "blobs"))
        await until(lambda: ("memory", stage.key(1)) in stage.fetcher.calls)
        lease = memory_lease(source="memory")
        os.close(lease.index_fd)
        # A socket cannot be opened anew through /proc.
        sock = socket.socket()
        stage.fetcher.end("memory", stage.key(1), msgspec.structs.replace(lease, index_fd=sock.detach()))
        assert "no descriptor left" in str(await stage.delivered(1))
        assert len(stage.outcomes) == 2


async def test_a_lost_blob_is_not_evicted_too() -> None:
    """1. The cache is full of one blob, which is granted. 2. Another shard waits for its space. 3. The blob is lost."""
    async with staged(shards_that_fit=1) as stage:
        first, second = (stage.runtime.open_session(stage.dataset) for _ in range(2))
        stage.runtime.demand(first, 0, stage.outcomes.append)
        await stage.ended("demand", 0, SHARD_BYTES)
        stage.runtime.demand(second, 1, stage.outcomes.append)
        await stage.ended("lease", 0, BlobLost(stage.key(0)))
        await stage.ended("demand", 1, SHARD_BYTES)
        await until(lambda: ("lease", stage.key(1)) in stage.fetcher.calls)
        assert stage.fetcher.log.count(("evict", stage.key(0))) == 0
        assert stage.planner.statistics().lost_blobs == 1
        assert stage.planner.statistics().evictions == 0


async def test_a_sick_disk_is_passed_by_one_memory_fetch_for_all_who_wait() -> None:
    async with staged() as stage:
        sessions = [stage.runtime.open_session(stage.dataset) for _ in range(3)]
        for session in sessions:
            stage.runtime.demand(session, 1, stage.outcomes.append)
        await stage.ended("demand", 1, DiskTrouble(28, "no space", "blobs"))
        await stage.ended("memory", 1, memory_lease(source="memory"))
        await stage.delivered(2)
        fds = {outcome.data_fd for outcome in stage.outcomes if isinstance(outcome, ShardLease)}
        assert len(fds) == 3
        assert [name for name, _ in stage.fetcher.log] == ["demand", "memory"]
        for session in sessions:
            stage.runtime.release(session, 1)
            with pytest.raises(ProtocolError):
                stage.runtime.release(session, 1)


async def served_from_memory(stage: Stage, session: int, shard: int) -> ShardLease | CacheloaderError:
    """The outcome of a demand whose blob the disk does not take."""
    number = len(stage.outcomes)
    stage.runtime.demand(session, shard, stage.outcomes.append)
    await stage.ended("demand", shard, DiskTrouble(28, "no space", "blobs"))
    await until(lambda: ("memory", stage.key(shard)) in stage.fetcher.calls or len(stage.outcomes) > number)
    if len(stage.outcomes) == number:
        await stage.ended("memory", shard, memory_lease(source="memory"))
    return await stage.delivered(number)


async def test_no_more_bytes_are_served_from_memory_than_allowed_and_those_given_back_count_no_more() -> None:
    async with staged(max_memory_bytes=2 * SHARD_BYTES) as stage:
        first, second = (stage.runtime.open_session(stage.dataset) for _ in range(2))
        assert isinstance(await served_from_memory(stage, first, 0), ShardLease)
        assert isinstance(await served_from_memory(stage, second, 1), ShardLease)
        refusal = await served_from_memory(stage, first, 2)
        assert "s3://b/2.tar (1000 B) cannot be cached now" in str(refusal)
        assert "max_memory_size" in str(refusal)
        stage.runtime.release(first, 0)
        assert isinstance(await served_from_memory(stage, first, 2), ShardLease)
        assert "cannot be cached now" in str(await served_from_memory(stage, first, 3))
        stage.runtime.close_session(second)
        assert isinstance(await served_from_memory(stage, first, 3), ShardLease)


async def test_a_shard_that_did_not_come_or_is_not_as_promised_takes_no_memory_for_good() -> None:
    async with staged(max_memory_bytes=SHARD_BYTES) as stage:
        session = stage.runtime.open_session(stage.dataset)
        for failed in (OriginNotFound("gone"), memory_lease(source="memory", num_samples=9)):
            stage.runtime.demand(session, 0, stage.outcomes.append)
            await stage.ended("demand", 0, DiskTrouble(28, "no space", "blobs"))
            await stage.ended("memory", 0, failed)
        await stage.delivered(1)
        assert isinstance(await served_from_memory(stage, session, 1), ShardLease)


async def test_a_lost_blob_is_dropped_once_and_fetched_again() -> None:
    """1. Two clients are granted one blob. 2. Neither can open it. 3. It is fetched once more, for both."""
    async with staged() as stage:
        first = stage.runtime.open_session(stage.dataset)
        stage.runtime.demand(first, 3, stage.outcomes.append)
        await stage.ended("demand", 3, SHARD_BYTES)
        await stage.ended("lease", 3, memory_lease())
        await stage.delivered(0)
        stage.runtime.release(first, 3)
        second = stage.runtime.open_session(stage.dataset)
        stage.runtime.demand(first, 3, stage.outcomes.append)
        stage.runtime.demand(second, 3, stage.outcomes.append)
        await until(lambda: ("lease 1", stage.key(3)) in stage.fetcher.calls)
        await stage.ended("lease", 3, BlobLost(stage.key(3)))
        await stage.ended("lease 1", 3, BlobLost(stage.key(3)))
        while len(stage.outcomes) < 3:
            await until(lambda: bool(stage.fetcher.calls) or len(stage.outcomes) == 3)
            for name, _ in list(stage.fetcher.calls):
                outcome: object = SHARD_BYTES if name == "demand" else memory_lease(source=name)
                await stage.ended(name, 3, outcome)
        assert stage.planner.statistics().lost_blobs == 1
        assert all(isinstance(outcome, ShardLease) for outcome in stage.outcomes)


async def test_a_blob_that_is_lost_again_and_again_is_served_from_memory() -> None:
    async with staged() as stage:
        stage.runtime.demand(stage.runtime.open_session(stage.dataset), 3, stage.outcomes.append)
        for _ in range(3):
            await stage.ended("demand", 3, SHARD_BYTES)
            await stage.ended("lease", 3, BlobLost(stage.key(3)))
        await stage.ended("memory", 3, memory_lease(source="memory"))
        assert isinstance(await stage.delivered(0), ShardLease)


async def test_a_blob_that_cannot_be_opened_for_now_is_kept_and_served_from_memory() -> None:
    async with staged() as stage:
        stage.runtime.demand(stage.runtime.open_session(stage.dataset), 3, stage.outcomes.append)
        await stage.ended("demand", 3, SHARD_BYTES)
        await stage.ended("lease", 3, DiskTrouble(24, "too many open files", "blobs"))
        await stage.ended("memory", 3, memory_lease(source="memory"))
        await stage.delivered(0)
        assert stage.planner.statistics().resident_shards == 1
        assert stage.planner.statistics().leased_shards == 0


async def test_a_shard_with_another_number_of_samples_than_promised_is_not_handed_out() -> None:
    async with staged() as stage:
        stage.runtime.demand(stage.runtime.open_session(stage.dataset), 4, stage.outcomes.append)
        await stage.ended("demand", 4, SHARD_BYTES)
        await stage.ended("lease", 4, memory_lease(num_samples=9))
        error = await stage.delivered(0)
        assert isinstance(error, DatasetError)
        assert "s3://b/4.tar holds 9 samples, and 10" in error.message
        assert stage.planner.statistics().leased_shards == 0


async def test_who_waits_for_space_that_nobody_gives_back_is_served_from_memory_in_the_end() -> None:
    async with staged(shards_that_fit=1, patience_s=0.05) as stage:
        holder, waiter = (stage.runtime.open_session(stage.dataset) for _ in range(2))
        stage.runtime.demand(holder, 0, stage.outcomes.append)
        await stage.ended("demand", 0, SHARD_BYTES)
        await stage.ended("lease", 0, memory_lease())
        await stage.delivered(0)
        stage.runtime.demand(waiter, 1, stage.outcomes.append)
        await stage.ended("memory", 1, memory_lease(source="memory"))
        assert isinstance(await stage.delivered(1), ShardLease)


async def test_room_is_made_before_a_fetch_begins() -> None:
    async with staged(shards_that_fit=1) as stage:
        session = stage.runtime.open_session(stage.dataset)
        stage.runtime.demand(session, 0, stage.outcomes.append)
        await stage.ended("demand", 0, SHARD_BYTES)
        await stage.ended("lease", 0, memory_lease())
        await stage.delivered(0)
        stage.runtime.release(session, 0)
        stage.runtime.demand(session, 1, stage.outcomes.append)
        await until(lambda: ("evict", stage.key(0)) in stage.fetcher.calls)
        assert ("demand", stage.key(1)) not in stage.fetcher.calls
        await stage.ended("evict", 0, None)
        await until(lambda: ("demand", stage.key(1)) in stage.fetcher.calls)


async def test_a_plan_beyond_the_quota_is_refused_and_the_session_goes_on() -> None:
    async with staged(shards_that_fit=2) as stage:
        session = stage.runtime.open_session(stage.dataset)

        def accesses(rows: int) -> Accesses:
            first = np.arange(4, dtype=np.int64) * 10
            return Accesses(first_clock=first, stop_clock=first + rows, shard=np.arange(4, dtype=np.int32))

        with pytest.raises(QuotaTooSmall, match=r"needs .* at once: 4 shards"):
            stage.runtime.follow(session, accesses(100), clock=0)
        stage.runtime.follow(session, accesses(10), clock=0)
        await until(lambda: ("prefetch", stage.key(0)) in stage.fetcher.calls)
        stage.runtime.demand(session, 0, stage.outcomes.append)
        assert stage.fetcher.promoted == [stage.key(0)]


async def test_a_task_of_the_daemons_own_can_wait_for_a_shard_and_be_cancelled() -> None:
    async with staged() as stage:
        session = stage.runtime.open_session(stage.dataset)
        waiting = asyncio.ensure_future(stage.runtime.acquire(session, 0))
        await until(lambda: ("demand", stage.key(0)) in stage.fetcher.calls)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await stage.ended("demand", 0, SHARD_BYTES)
        await stage.ended("lease", 0, memory_lease())
        await until(lambda: stage.planner.statistics().leased_shards == 0)
        taking = asyncio.ensure_future(stage.runtime.acquire(session, 0))
        await stage.ended("lease", 0, memory_lease())
        (await taking).close()


async def test_stopping_ends_all_work_that_is_under_way() -> None:
    async with staged() as stage:
        session = stage.runtime.open_session(stage.dataset)
        for shard in range(6):
            stage.runtime.demand(session, shard, stage.outcomes.append)
        await until(lambda: len(stage.fetcher.calls) == 6)
    assert all(call.cancelled() for call in stage.fetcher.calls.values())
    assert stage.outcomes == []
