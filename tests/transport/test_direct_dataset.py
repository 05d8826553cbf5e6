"""What a helper process does with the manifests that it knows."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from cacheloader import fdpass
from cacheloader.errors import StateMismatch
from cacheloader.manifest.record import Manifest
from cacheloader.origin.slots import TransferSlots, Urgency
from cacheloader.protocol.messages import DatasetSpec
from cacheloader.transport.direct_dataset import DirectDataset
from cacheloader.transport.direct_manifests import ManifestFolder
from tests.support.shard_sets import write_shards
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


async def dataset_of(folder: Path, manifests: ManifestFolder, *, digest: str, stages: list[str]) -> DirectDataset:
    return await DirectDataset.open(
        DatasetSpec(urls=[f"{folder}/"]),
        digest=digest,
        manifests=manifests,
        slots=TransferSlots(),
        progress=lambda stage, _done, _total: stages.append(stage),
    )


async def opened(folder: Path, manifests: ManifestFolder, *, digest: str, stages: list[str]) -> Manifest:
    return (await dataset_of(folder, manifests, digest=digest, stages=stages)).manifest


async def test_a_known_manifest_is_taken_unless_it_speaks_of_another_store(tmp_path: Path):
    shards = write_shards(tmp_path / "data", num_shards=2, samples_per_shard=3)
    manifests = ManifestFolder(tmp_path / "manifests")
    stages: list[str] = []
    resolved = await opened(shards.folder, manifests, digest="", stages=stages)
    assert stages
    stages.clear()
    again = await opened(shards.folder, manifests, digest=resolved.digest, stages=stages)
    assert again.digest == resolved.digest
    assert not stages, "nobody was asked"
    rows = map(resolved.shard, range(len(resolved)))
    elsewhere = Manifest.build(rows, format=resolved.format, origin_id="another store")
    given = ManifestFolder(tmp_path / "none", given=elsewhere)
    with pytest.raises(StateMismatch, match=resolved.digest):
        await opened(shards.folder, given, digest=elsewhere.digest, stages=stages)
    assert stages, "the store was asked"


async def test_a_fetch_that_is_given_up_closes_its_file_once_no_thread_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shards = write_shards(tmp_path / "data", num_shards=1, samples_per_shard=3)
    dataset = await dataset_of(shards.folder, ManifestFolder(tmp_path / "manifests"), digest="", stages=[])
    writing, given_up = threading.Event(), threading.Event()
    found: list[str] = []

    def write(fd: int, *_: object, **__: object) -> None:
        writing.set()
        given_up.wait(60)
        found.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(fdpass, "write_whole", write)
    fetch = asyncio.create_task(dataset.fetch(0, Urgency()))
    await until(writing.is_set)
    fetch.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not fetch.done()
    given_up.set()
    with suppress(asyncio.CancelledError):
        await fetch
    assert fetch.cancelled()
    assert found == ["/memfd:cacheloader-shard (deleted)"]
