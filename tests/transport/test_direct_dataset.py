"""What a helper process does with the manifests that it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cacheloader.errors import StateMismatch
from cacheloader.manifest.record import Manifest
from cacheloader.origin.slots import TransferSlots
from cacheloader.protocol.messages import DatasetSpec
from cacheloader.transport.direct_dataset import DirectDataset
from cacheloader.transport.direct_manifests import ManifestFolder
from tests.support.shard_sets import write_shards

if TYPE_CHECKING:
    from pathlib import Path


async def opened(folder: Path, manifests: ManifestFolder, *, digest: str, stages: list[str]) -> Manifest:
    dataset = await DirectDataset.open(
        DatasetSpec(urls=[f"{folder}/"]),
        digest=digest,
        manifests=manifests,
        slots=TransferSlots(),
        progress=lambda stage, _done, _total: stages.append(stage),
    )
    return dataset.manifest


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
