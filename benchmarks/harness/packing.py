"""The data set under test: written once by webdataset's own ShardWriter, then described."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.harness.measurement import Tally
from benchmarks.harness.meter import sample_checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FIELD = "bin"
PICTURE_SIZE = (500, 375)
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
    rng = np.random.default_rng(_SEED)
    payloads = (rng.bytes(sample_bytes) for _ in range(samples))
    return _pack(folder, payloads, samples=samples, shards=shards, delivered=lambda payload: payload)


def pack_pictures(folder: Path, *, samples: int, shards: int, delivered: Callable[[bytes], bytes]) -> PackedShards:
    """Write shards of JPEGs of about 100 kB.

    Args:
        folder: Is made.
        samples: How many, a multiple of ``shards``.
        shards: How many files.
        delivered: What a loader with the benchmark's transform delivers for a payload; ``expected`` is of that.
    """
    return _pack(folder, _pictures(samples), samples=samples, shards=shards, delivered=delivered)


def _pictures(samples: int) -> Iterator[bytes]:
    from PIL import Image

    rng = np.random.default_rng(_SEED)
    for _ in range(samples):
        # Large shapes under fine grain: compresses like a photograph, neither to nothing nor not at all.
        shapes = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(PICTURE_SIZE)
        grain = rng.normal(0, 12, (PICTURE_SIZE[1], PICTURE_SIZE[0], 3))
        pixels = np.clip(np.asarray(shapes) + grain, 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=85)
        yield file.getvalue()


def _pack(
    folder: Path, payloads: Iterator[bytes], *, samples: int, shards: int, delivered: Callable[[bytes], bytes]
) -> PackedShards:
    import webdataset

    if samples % shards:
        raise ValueError(f"{samples} samples cannot be shared evenly by {shards} shards")
    folder.mkdir(parents=True)
    checksum = size_bytes = 0
    with webdataset.ShardWriter(str(folder / "train-%06d.tar"), maxcount=samples // shards, verbose=0) as writer:
        for i, payload in enumerate(payloads):
            key, sample = f"{i:08d}", delivered(payload)
            writer.write({"__key__": key, FIELD: payload})
            checksum += sample_checksum(key, sample)
            size_bytes += len(sample)
    paths = sorted(folder.glob("*.tar"))
    members = [_members(path) for path in paths]
    counts = [{"url": path.name, "nsamples": len(found)} for path, found in zip(paths, members, strict=True)]
    (folder / "shards.json").write_text(json.dumps({"wids_version": 1, "shardlist": counts}))
    return PackedShards(
        folder=folder,
        names=[path.name for path in paths],
        sizes_bytes=[path.stat().st_size for path in paths],
        members=members,
        expected=Tally(samples=samples, size_bytes=size_bytes, checksum=checksum % 2**64),
    )


def _members(path: Path) -> list[tuple[int, int]]:
    with tarfile.open(path) as tar:
        return [(member.offset_data, member.offset_data + member.size) for member in tar if member.isfile()]
