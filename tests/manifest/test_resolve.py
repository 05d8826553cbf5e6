from __future__ import annotations

import json

import numpy as np
import pytest

from cacheloader.errors import ConfigError, CorruptShard, EmptyDataset, OriginDenied, OriginUnavailable
from cacheloader.formats import registry
from cacheloader.formats.webdataset import WebDatasetFormat
from cacheloader.manifest.record import Manifest
from cacheloader.manifest.resolve import format_of, resolve
from cacheloader.manifest.scan import ScanCounter
from cacheloader.protocol.messages import DatasetSpec
from tests.support.memory_origin import MemoryOrigin
from tests.support.tars import packed
from tests.support.waiting import until

B = "mem://bucket/"


def shard(num_samples: int) -> bytes:
    return packed([(f"{i}.bin", b"x") for i in range(num_samples)])


class WatchedCounter(ScanCounter):
    """Counts, and remembers what it was asked to count."""

    def __init__(self, origin: MemoryOrigin) -> None:
        super().__init__(origin, WebDatasetFormat())
        self.counted: list[str] = []

    async def count(self, shards, *, progress):
        self.counted += [info.uri.removeprefix(B) for info in shards]
        return await super().count(shards, progress=progress)


async def resolved(objects: dict[str, bytes], *urls: str, **spec) -> tuple[Manifest, WatchedCounter]:
    origin = MemoryOrigin({B + name: content for name, content in objects.items()})
    counter = WatchedCounter(origin)
    return await resolve(DatasetSpec(urls=list(urls), **spec), origin, counter), counter


async def test_shards_without_counts_are_counted():
    manifest, counter = await resolved({"0.tar": shard(3), "1.tar": shard(5)}, B + "{1,0}.tar")
    assert manifest.num_samples.tolist() == [5, 3]
    assert [manifest.uri(i) for i in range(2)] == [B + "1.tar", B + "0.tar"]
    assert manifest.format == "webdataset"
    assert manifest.origin_id == "mem://bucket"
    assert manifest.size_bytes.tolist() == [len(shard(5)), len(shard(3))]
    assert manifest.version(0) == (await MemoryOrigin({B: shard(5)}).stat(B)).version
    assert counter.counted == ["1.tar", "0.tar"]


async def test_counts_beside_the_shards_are_asked_for_while_these_are_still_being_listed():
    class Slow(MemoryOrigin):
        async def list(self, prefix):
            await until(lambda: self.asked["read", B + "shards.json"] == 1)
            async for info in super().list(prefix):
                yield info

    sidecar = json.dumps({"0.tar": 3}).encode()
    origin = Slow({B + "0.tar": b"-", B + "shards.json": sidecar})
    manifest = await resolve(DatasetSpec(urls=[B]), origin, WatchedCounter(origin))
    assert manifest.num_samples.tolist() == [3]
    assert origin.asked["read", B + "shards.json"] == 1


async def test_what_was_asked_ahead_in_vain_hides_no_error():
    origin = MemoryOrigin({B + "notes.txt": b"-"})
    origin.fail(OriginDenied("no", uri=B), verb="stat", times=100)
    origin.fail(OriginUnavailable("gone", uri=B), verb="stat", uri=B + "sizes.json", times=100)
    with pytest.raises(EmptyDataset, match="stands for no shard"):
        await resolve(DatasetSpec(urls=[B]), origin, WatchedCounter(origin))


async def test_counts_that_are_written_down_cost_no_read():
    sidecar = json.dumps({"0.tar": 3, "1.tar": 5}).encode()
    manifest, counter = await resolved({"0.tar": b"-", "1.tar": b"-", "shards.json": sidecar}, B)
    assert manifest.num_samples.tolist() == [3, 5]
    assert counter.counted == []


async def test_only_shards_without_a_count_are_counted_and_none_twice():
    objects = {"0.tar": shard(3), "1.tar": shard(5), "sizes.json": b'{"0.tar": 3}'}
    manifest, counter = await resolved(objects, B + "{1,0,1}.tar")
    assert manifest.num_samples.tolist() == [5, 3, 5]
    assert counter.counted == ["1.tar"]


async def test_the_same_shards_have_the_same_digest_however_they_are_named():
    objects = {f"{i}.tar": shard(i) for i in range(3)}
    digests = {(await resolved(objects, url))[0].digest for url in (B, B + "*.tar", B + "{0..2}.tar")}
    assert len(digests) == 1
    assert (await resolved(objects, B + "{2..0}.tar"))[0].digest not in digests


async def test_an_empty_shard_among_others_is_fine_but_nothing_at_all_is_an_error():
    manifest, _ = await resolved({"0.tar": shard(0), "1.tar": shard(1)}, B)
    assert manifest.num_samples.tolist() == [0, 1]
    with pytest.raises(EmptyDataset, match="the 1 shards of mem://bucket/ hold no sample"):
        await resolved({"0.tar": shard(0)}, B)


async def test_progress_tells_what_is_being_done():
    origin = MemoryOrigin({f"{B}{i}.tar": shard(1) for i in range(3)})
    steps: list[tuple[str, int, int]] = []
    spec = DatasetSpec(urls=[B])
    await resolve(spec, origin, WatchedCounter(origin), progress=lambda *step: steps.append(step))
    assert ("listing", 3, 0) in steps
    assert ("counting samples", 0, 3) in steps
    assert steps[-1] == ("counting samples", 3, 3)


async def test_a_format_that_is_named_needs_no_ending():
    manifest, _ = await resolved({"d/0": shard(2), "d/1": shard(2)}, B + "d/{0,1}", format="webdataset")
    assert manifest.total_samples == 4
    with pytest.raises(ConfigError, match="pass format="):
        await resolved({"d/0": shard(2)}, B + "d/0")
    with pytest.raises(ConfigError, match="known formats are webdataset"):
        await resolved({"d/0": shard(2)}, B + "d/0", format="parquet")


async def test_a_damaged_shard_is_named():
    with pytest.raises(CorruptShard, match=r"mem://bucket/1\.tar"):
        await resolved({"0.tar": shard(3), "1.tar": shard(3)[:700]}, B)


def test_shards_of_two_formats_are_refused(monkeypatch):
    class Other(WebDatasetFormat):
        name = "other"
        suffixes = (".bin",)

    monkeypatch.setattr(registry, "FORMATS", (WebDatasetFormat(), Other()))
    assert format_of("", ["a.bin", "b.bin"]).name == "other"
    with pytest.raises(ConfigError, match=r"several: webdataset \(a.tar\), other \(b.bin\)"):
        format_of("", ["a.tar", "b.bin"])


async def test_a_resolved_manifest_survives_the_wire():
    manifest, _ = await resolved({"0.tar": shard(3)}, B)
    again = Manifest.from_buffer(bytes(manifest.to_bytes()))
    assert again.digest == manifest.digest
    assert np.array_equal(again.num_samples, manifest.num_samples)
