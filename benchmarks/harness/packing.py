"""The data set under test: written once by webdataset's own ShardWriter, then described."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.harness.measurement import Tally
from benchmarks.harness.meter import sample_checksum

if TYPE_CHECKING:
    from pathlib import Path

FIELD = "bin"
_SEED = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShards:
    """Tar shards in a local folder.

    Attributes:
        folder: Where they lie.
        names: File names, sorted.
        sizes_bytes: Length of each shard.
        members: For each shard, where the payload of each sample lies: (start, stop).
        expected: What one epoch is.
    """

    folder: Path
    names: list[str]
    sizes_bytes: list[int]
    members: list[list[tuple[int, int]]]
    expected: Tally

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(self.sizes_bytes)

    @property
    def samples_per_shard(self) -> list[int]:
        """Sample count of each shard."""
        return [len(members) for members in self.members]


def pack(folder: Path, *, samples: int, sample_bytes: int, shards: int) -> PackedShards:
    """Write the shards and ``shards.json``.

    Args:
        folder: Is made.
        samples: How many, a multiple of ``shards``.
        sample_bytes: Payload of each sample: random bytes, which nothing on the way can compress.
        shards: How many files.
    """
    import webdataset

    if samples % shards:
        raise ValueError(f"{samples} samples cannot be shared evenly by {shards} shards")
    folder.mkdir(parents=True)
    rng = np.random.default_rng(_SEED)
    checksum = 0
    with webdataset.ShardWriter(str(folder / "train-%06d.tar"), maxcount=samples // shards, verbose=0) as writer:
        for i in range(samples):
            key, payload = f"{i:08d}", rng.bytes(sample_bytes)
            writer.write({"__key__": key, FIELD: payload})
            checksum += sample_checksum(key, payload)
    paths = sorted(folder.glob("*.tar"))
    members = [_members(path) for path in paths]
    counts = [{"url": path.name, "nsamples": len(found)} for path, found in zip(paths, members, strict=True)]
    (folder / "shards.json").write_text(json.dumps({"wids_version": 1, "shardlist": counts}))
    return PackedShards(
        folder=folder,
        names=[path.name for path in paths],
        sizes_bytes=[path.stat().st_size for path in paths],
        members=members,
        expected=Tally(samples=samples, size_bytes=samples * sample_bytes, checksum=checksum % 2**64),
    )


def _members(path: Path) -> list[tuple[int, int]]:
    with tarfile.open(path) as tar:
        return [(member.offset_data, member.offset_data + member.size) for member in tar if member.isfile()]
