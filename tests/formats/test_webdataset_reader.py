from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheloader.errors import DatasetError
from cacheloader.formats.source import FileSource
from cacheloader.formats.webdataset import WebDatasetFormat
from tests.support.buffers import BufferSource
from tests.support.tars import URI, packed

if TYPE_CHECKING:
    from cacheloader.formats.webdataset_reader import WebDatasetReader

FORMAT = WebDatasetFormat()


class CountingSource(BufferSource):
    """A shard in memory that remembers what was read of it."""

    __slots__ = ("reads",)

    def __init__(self, shard: bytes) -> None:
        super().__init__(shard)
        self.reads: list[tuple[int, int, bytes]] = []

    def read(self, start: int, stop: int) -> bytes:
        block = super().read(start, stop)
        self.reads.append((start, stop, block))
        return block


def opened(shard: bytes, columns=None) -> tuple[WebDatasetReader, CountingSource]:
    index = FORMAT.build_index(BufferSource(shard), uri=URI)
    source = CountingSource(shard)
    return FORMAT.open(source, index, uri=URI, columns=columns), source


def pictures(count: int, size_bytes: int = 100) -> bytes:
    return packed(
        [
            (f"{i:04d}.{field}", content)
            for i in range(count)
            for field, content in (("jpg", bytes([i % 256]) * size_bytes), ("cls", b"%d" % i))
        ]
    )


def test_samples_come_in_the_order_asked_for_and_may_repeat():
    reader, _ = opened(pictures(20))
    assert [s["__key__"] for s in reader.read(np.array([7, 0, 19, 7]))] == ["0007", "0000", "0019", "0007"]
    assert [s["cls"] for s in reader.read(np.array([7, 0, 19, 7]))] == [b"7", b"0", b"19", b"7"]


def test_neighbours_are_read_in_one_call():
    reader, source = opened(pictures(20))
    reader.read(np.array([3, 4, 2]))
    assert len(source.reads) == 1


def test_far_samples_are_read_apart():
    reader, source = opened(pictures(100))
    reader.read(np.array([0, 99]))
    assert len(source.reads) == 2
    assert sum(stop - start for start, stop, _ in source.reads) < 4096


def test_a_large_member_is_the_very_bytes_that_were_read():
    reader, source = opened(pictures(3, size_bytes=100_000))
    samples = reader.read(np.array([1, 2]))
    blocks = [block for _, _, block in source.reads]
    assert any(samples[0]["jpg"] is block for block in blocks)
    assert any(samples[1]["jpg"] is block for block in blocks)


def test_columns_restrict_what_is_read_and_returned():
    reader, source = opened(pictures(3, size_bytes=100_000), columns=["cls"])
    assert reader.read(np.array([2])) == [{"__key__": "0002", "cls": b"2"}]
    assert sum(stop - start for start, stop, _ in source.reads) == 1


def test_the_key_is_there_whether_or_not_it_is_a_column():
    assert opened(pictures(1), columns=["__key__"])[0].read(np.array([0])) == [{"__key__": "0000"}]
    assert opened(pictures(1), columns=[])[0].read(np.array([0])) == [{"__key__": "0000"}]


def test_samples_with_different_fields_each_get_their_own():
    reader, _ = opened(packed([("a.x", b"1"), ("b.y", b"2"), ("b.x", b"3"), ("c.x", b"4"), ("c.y", b"5")]))
    assert reader.read(np.array([2, 1, 0])) == [
        {"__key__": "c", "x": b"4", "y": b"5"},
        {"__key__": "b", "y": b"2", "x": b"3"},
        {"__key__": "a", "x": b"1"},
    ]
    reader, _ = opened(packed([("a.x", b"1"), ("b.y", b"2"), ("b.x", b"3")]), columns=["x"])
    assert reader.read(np.array([1, 0])) == [{"__key__": "b", "x": b"3"}, {"__key__": "a", "x": b"1"}]


def test_a_sample_that_lacks_a_column_is_named_with_its_fields():
    reader, _ = opened(packed([("a.x", b"1"), ("a.z", b"1"), ("b.y", b"2"), ("b.w", b"2")]), columns=["x", "z"])
    assert len(reader.read(np.array([0]))) == 1
    with pytest.raises(DatasetError, match=r"sample 'b' of shard .* has the fields y, w and not x, z"):
        reader.read(np.array([0, 1]))


def test_a_column_that_no_sample_has_is_an_error_of_the_sample_that_is_read():
    reader, _ = opened(pictures(2), columns=["png"])
    with pytest.raises(DatasetError, match="has the fields jpg, cls and not png"):
        reader.read(np.array([1]))


@pytest.mark.parametrize("outside", [[-1], [20], [0, 10**12]])
def test_a_position_outside_the_shard_is_refused(outside):
    with pytest.raises(IndexError, match="of 20"):
        opened(pictures(20))[0].read(np.array(outside))


def test_no_samples_asked_for_is_no_samples():
    assert opened(pictures(2))[0].read(np.array([], dtype=np.int64)) == []


def test_empty_members_are_empty_bytes():
    reader, _ = opened(packed([("a.x", b""), ("b.x", b""), ("b.y", b"1")]))
    assert reader.read(np.arange(2)) == [{"__key__": "a", "x": b""}, {"__key__": "b", "x": b"", "y": b"1"}]


def test_fields_are_bytes_even_if_the_shard_is_mapped_memory():
    shard = pictures(2)
    index = FORMAT.build_index(BufferSource(bytearray(shard)), uri=URI)
    sample = FORMAT.open(BufferSource(memoryview(shard)), index, uri=URI).read(np.array([0]))[0]
    assert type(sample["jpg"]) is bytes


def test_a_file_is_read_through_its_descriptor(tmp_path):
    path = tmp_path / "shard.tar"
    path.write_bytes(pictures(50))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        source = FileSource(descriptor)
        reader = FORMAT.open(source, FORMAT.build_index(source, uri=URI), uri=URI)
        assert reader.read(np.arange(50)) == opened(pictures(50))[0].read(np.arange(50))
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
        os.truncate(path, 1000)
        with pytest.raises(OSError, match="the file ends at byte"):
            reader.read(np.array([49]))
    finally:
        os.close(descriptor)


@given(st.data())
@settings(max_examples=60)
def test_any_selection_reads_the_same_as_one_by_one(data):
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 700, 40_000]), min_size=1, max_size=12))
    shard = packed([(f"{i}.{'ab'[j]}", bytes([i]) * (size + j)) for i, size in enumerate(sizes) for j in range(2)])
    reader, _ = opened(shard, columns=data.draw(st.sampled_from([None, ["a"], ["b"], ["b", "a"]])))
    chosen = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20))
    together = reader.read(np.array(chosen, dtype=np.int64))
    assert together == [reader.read(np.array([sample]))[0] for sample in chosen]
