"""What every shard format promises, whatever its bytes look like."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cacheloader.errors import CorruptShard
from cacheloader.formats.base import ShardFormat, index_samples
from cacheloader.formats.registry import FORMATS, named
from tests.support.buffers import BufferSource
from tests.support.tars import packed

URI = "mem://bucket/shard"


@dataclass(frozen=True, kw_only=True)
class Example:
    """A shard of a format, and the samples that were packed into it."""

    format: ShardFormat
    shard: bytes
    samples: list[dict[str, Any]]
    column: str


def webdataset_example() -> Example:
    samples = [{"__key__": f"{i:03d}", "jpg": random.Random(i).randbytes(i * 701), "cls": b"%d" % i} for i in range(60)]
    members = [(f"{s['__key__']}.{field}", s[field]) for s in samples for field in ("jpg", "cls")]
    return Example(format=named("webdataset"), shard=packed(members), samples=samples, column="cls")


EXAMPLES = [webdataset_example()]


@pytest.fixture(params=EXAMPLES, ids=lambda example: example.format.name)
def example(request) -> Example:
    return request.param


def opened(example: Example, **options: Any):
    source = BufferSource(example.shard)
    return example.format.open(source, example.format.build_index(source, uri=URI), uri=URI, **options)


def test_every_format_has_an_example():
    assert {example.format.name for example in EXAMPLES} == {shard_format.name for shard_format in FORMATS}


def test_names_and_endings_are_unambiguous():
    names = [shard_format.name for shard_format in FORMATS]
    endings = [suffix for shard_format in FORMATS for suffix in shard_format.suffixes]
    assert len(set(names)) == len(names)
    assert len(set(endings)) == len(endings)
    assert all(ending.startswith(".") and ending == ending.lower() for ending in endings)


def test_the_index_starts_with_the_sample_count(example):
    index = example.format.build_index(BufferSource(example.shard), uri=URI)
    assert index_samples(index) == len(example.samples) == opened(example).num_samples


def test_the_same_shard_has_the_same_index(example):
    first, second = (example.format.build_index(BufferSource(example.shard), uri=URI) for _ in range(2))
    assert first == second


def test_all_samples_are_what_was_packed(example):
    assert opened(example).read(np.arange(len(example.samples))) == example.samples


def test_samples_come_in_any_order_and_with_repeats(example):
    order = np.random.default_rng(7).integers(0, len(example.samples), 200)
    assert opened(example).read(order) == [example.samples[sample] for sample in order]


def test_samples_are_the_callers_own(example):
    reader = opened(example)
    first, second = reader.read(np.array([1, 1]))
    first.clear()
    assert second == example.samples[1] == reader.read(np.array([1]))[0]


def test_columns_leave_the_key_and_what_was_asked_for(example):
    read = opened(example, columns=[example.column]).read(np.array([5, 3]))
    assert read == [{name: example.samples[i][name] for name in ("__key__", example.column)} for i in (5, 3)]


def test_no_samples_are_no_reads(example):
    assert opened(example).read(np.array([], dtype=np.int64)) == []


@pytest.mark.parametrize("sample", [-1, 60])
def test_a_position_outside_is_an_index_error(example, sample):
    with pytest.raises(IndexError):
        opened(example).read(np.array([0, sample]))


def test_a_shard_that_is_cut_off_is_corrupt_and_named(example):
    for size_bytes in (0, 1, len(example.shard) // 2 + 1):
        with pytest.raises(CorruptShard, match=URI) as caught:
            example.format.build_index(BufferSource(example.shard[:size_bytes]), uri=URI)
        assert caught.value.uri == URI


def test_a_damaged_index_is_corrupt_and_never_a_crash(example):
    index = example.format.build_index(BufferSource(example.shard), uri=URI)
    source = BufferSource(example.shard)
    draw = random.Random(3)
    for _ in range(200):
        damaged = bytearray(index)
        damaged[draw.randrange(len(index))] ^= draw.randrange(1, 256)
        with pytest.raises(CorruptShard, match=URI):
            example.format.open(source, bytes(damaged), uri=URI)
    for stop in range(0, len(index), 97):
        with pytest.raises(CorruptShard, match=URI):
            example.format.open(source, index[:stop], uri=URI)


def test_an_index_opens_from_any_buffer(example):
    source = BufferSource(example.shard)
    index = example.format.build_index(source, uri=URI)
    reader = example.format.open(source, memoryview(bytearray(index)), uri=URI)
    assert reader.read(np.array([2])) == [example.samples[2]]
