"""Data sets for tests, written by webdataset's own writer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import webdataset as wds

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSet:
    """A folder of tar shards and what lies in them.

    Attributes:
        folder: Where the shards are.
        digests: Key of each sample to the digest of its fields, in data-set order.
    """

    folder: Path
    digests: dict[str, str]

    @property
    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.tar"))

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    @property
    def shard_bytes(self) -> int:
        """Size of the largest shard."""
        return max(path.stat().st_size for path in self.paths)

    def upload(self, client: Any, bucket: str, prefix: str) -> str:
        """Put the shards below ``prefix`` and return the directory's URL."""
        for path in self.paths:
            client.upload_file(str(path), bucket, f"{prefix}/{path.name}")
        return f"s3://{bucket}/{prefix}/"


def write_shards(
    folder: Path, *, num_shards: int, samples_per_shard: int, sample_bytes: int = 2000, seed: int = 0
) -> ShardSet:
    """Samples of random size around ``sample_bytes`` with three fields, in shards of ``samples_per_shard``."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    digests: dict[str, str] = {}
    pattern = str(folder / "shard-%06d.tar")
    with wds.ShardWriter(pattern, maxcount=samples_per_shard, maxsize=2**40, verbose=0) as writer:
        for i in range(num_shards * samples_per_shard):
            sample = {
                "__key__": f"sample{i:07d}",
                "bin": rng.bytes(int(rng.integers(sample_bytes // 2, sample_bytes * 3 // 2 + 1))),
                "cls": str(i % 10).encode(),
                "meta.json": f'{{"number": {i}}}'.encode(),
            }
            writer.write(sample)
            digests[sample["__key__"]] = digest(sample)
    return ShardSet(folder=folder, digests=digests)


def digest(sample: dict[str, Any]) -> str:
    """Of all fields of a sample but its key."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(sample):
        if not name.startswith("__"):
            state.update(name.encode() + b"\0" + len(sample[name]).to_bytes(8, "little") + sample[name])
    return state.hexdigest()


def key_and_digest(sample: dict[str, Any]) -> tuple[str, str]:
    """A transform that lets a test check a sample's bytes without sending them through a pipe."""
    return sample["__key__"], digest(sample)
