"""What the sessions of one helper process share, and what they do not."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cacheloader.protocol import frames
from cacheloader.protocol.messages import DatasetSpec
from cacheloader.protocol.plans import Accesses
from cacheloader.transport.direct_dataset import DirectDataset
from cacheloader.transport.direct_datasets import DirectDatasets
from cacheloader.transport.direct_manifests import ManifestFolder
from tests.support.shard_sets import ShardSet, write_shards
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from cacheloader.origin.slots import Urgency
    from cacheloader.transport.direct_reader import DirectReader
    from cacheloader.transport.direct_shards import ShardInMemory


@pytest.fixture
def shards(tmp_path: Path) -> ShardSet:
    return write_shards(tmp_path / "data", num_shards=6, samples_per_shard=3)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each shard was fetched."""
    counter: Counter[int] = Counter()
    fetch = DirectDataset.fetch

    async def counted(self: DirectDataset, shard: int, urgency: Urgency) -> ShardInMemory:
        counter[shard] += 1
        return await fetch(self, shard, urgency)

    monkeypatch.setattr(DirectDataset, "fetch", counted)
    return counter


@pytest.fixture
def datasets(tmp_path: Path) -> DirectDatasets:
    return DirectDatasets(ManifestFolder(tmp_path / "manifests"), memory_bytes=2**20)


def named(shards: ShardSet, **environment: str) -> bytes:
    return frames.encode(DatasetSpec(urls=[f"{shards.folder}/"], environment=environment))


async def opened(datasets: DirectDatasets, spec: bytes, digest: str = "") -> DirectReader:
    return await datasets.open(spec, digest=digest, progress=lambda *_: None)


def follow(reader: DirectReader, *shards: int) -> None:
    first = np.arange(len(shards), dtype=np.int64) * 10
    plan = Accesses(first_clock=first, stop_clock=first + 10, shard=np.array(shards, dtype=np.int32))
    reader.follow(plan.to_bytes(), num_accesses=len(shards), clock=0)


async def test_sessions_of_one_job_resolve_once_and_fetch_each_shard_once(
    datasets: DirectDatasets, shards: ShardSet, fetched: Counter[int]
) -> None:
    readers = await asyncio.gather(*(opened(datasets, named(shards)) for _ in range(3)))
    later = await opened(datasets, named(shards), digest=readers[0].manifest.digest)
    assert len({id(reader.dataset) for reader in (*readers, later)}) == 1
    for reader in (*readers, later):
        data, _ = await reader.acquire(2)
        assert data.size_bytes == shards.paths[2].stat().st_size
    assert fetched == {2: 1}


async def test_sessions_with_other_credentials_share_nothing(
    datasets: DirectDatasets, shards: ShardSet, fetched: Counter[int]
) -> None:
    one = await opened(datasets, named(shards, AWS_PROFILE="one"))
    other = await opened(datasets, named(shards, AWS_PROFILE="other"), digest=one.manifest.digest)
    for reader in (one, other):
        await reader.acquire(2)
    assert fetched == {2: 2}


async def test_what_each_session_needs_next_comes_before_what_any_needs_after_that(
    datasets: DirectDatasets, shards: ShardSet, fetched: Counter[int]
) -> None:
    readers = [await opened(datasets, named(shards)) for _ in range(2)]
    readers[0].soon, readers[1].soon = [0, 1], [3, 4]
    readers[0]._moved()
    await until(lambda: len(fetched) == 4)
    assert list(fetched) == [0, 3, 1, 4]


async def test_a_session_that_ends_gives_back_its_leases_and_another_keeps_its_own(
    datasets: DirectDatasets, shards: ShardSet
) -> None:
    one, other = [await opened(datasets, named(shards)) for _ in range(2)]
    for reader in (one, other):
        await reader.acquire(2)
    await one.acquire(3)
    datasets.close(one)
    assert datasets._memory.is_leased((other.dataset, 2))
    assert not datasets._memory.is_leased((other.dataset, 3))
    other.release(2)
    assert not datasets._memory.is_leased((other.dataset, 2))


async def test_a_data_set_that_nobody_reads_any_more_takes_no_memory_and_no_request(
    datasets: DirectDatasets, shards: ShardSet
) -> None:
    reader = await opened(datasets, named(shards))
    follow(reader, 0, 1, 2, 3)
    await reader.acquire(5)
    datasets.close(reader)
    memory = datasets._memory
    assert not any((reader.dataset, shard) in memory for shard in range(6))
    again = await opened(datasets, named(shards))
    assert again.dataset is not reader.dataset


async def test_an_opening_goes_on_when_one_of_those_who_wait_gives_up(
    datasets: DirectDatasets, shards: ShardSet
) -> None:
    first, second = (asyncio.create_task(opened(datasets, named(shards))) for _ in range(2))
    await until(lambda: bool(datasets._openings))
    first.cancel()
    assert len((await second).manifest) == 6
    await asyncio.gather(first, return_exceptions=True)


async def test_an_opening_ends_when_all_who_wait_give_up_and_can_be_begun_again(
    datasets: DirectDatasets, shards: ShardSet
) -> None:
    first = asyncio.create_task(opened(datasets, named(shards)))
    await until(lambda: bool(datasets._openings))
    first.cancel()
    assert len((await opened(datasets, named(shards))).manifest) == 6
    await asyncio.gather(first, return_exceptions=True)
    assert not datasets._openings
