"""The checksum of a shard whose ranges come in any order."""

from __future__ import annotations

import itertools

import google_crc32c
import pytest
from cacheloader_daemon.checksum import BLOCK_BYTES, ShardChecksum, joined
from hypothesis import given
from hypothesis import strategies as st


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined_sums_are_the_sum_of_the_joined_bytes(first: bytes, second: bytes) -> None:
    together = joined(google_crc32c.value(first), google_crc32c.value(second), len(second))
    assert together == google_crc32c.value(first + second)


@given(st.data(), st.binary(max_size=500), st.lists(st.integers(min_value=0, max_value=500), max_size=6))
def test_ranges_in_any_order_give_the_sum_and_the_bytes(data: st.DataObject, content: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(content), *(min(cut, len(content)) for cut in cuts)})
    ranges = data.draw(st.permutations(list(itertools.pairwise(edges))))
    written = bytearray(len(content))

    def write_at(offset: int, block: memoryview) -> None:
        written[offset : offset + len(block)] = block

    sums = ShardChecksum()
    for start, stop in ranges:
        sums.write(write_at, start, content[start:stop])
    assert sums.value(len(content)) == google_crc32c.value(content)
    assert written == content


def test_a_range_above_one_block_is_summed_block_by_block() -> None:
    content = bytes(range(256)) * (BLOCK_BYTES // 100)
    blocks: list[tuple[int, int]] = []
    sums = ShardChecksum()
    sums.write(lambda offset, block: blocks.append((offset, memoryview(block).nbytes)), 0, content)
    assert sums.value(len(content)) == google_crc32c.value(content)
    assert len(blocks) == -(-len(content) // BLOCK_BYTES)
    assert sum(size for _, size in blocks) == len(content)


@pytest.mark.parametrize("ranges", [[], [(0, 4)], [(4, 10)], [(0, 4), (5, 10)], [(0, 6), (4, 10)], [(0, 10), (10, 12)]])
def test_sums_that_do_not_cover_the_shard_once_are_refused(ranges: list[tuple[int, int]]) -> None:
    sums = ShardChecksum()
    for start, stop in ranges:
        sums.write(lambda _offset, _block: None, start, bytes(stop - start))
    with pytest.raises(ValueError, match="do not cover"):
        sums.value(10)
