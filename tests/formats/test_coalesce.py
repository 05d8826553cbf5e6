from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.formats.coalesce import coalesce

ranges = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300)), max_size=60)


def merged(pairs: list[tuple[int, int]], **limits: int):
    start = np.array([a for a, _ in pairs], dtype=np.int64)
    size = np.array([n for _, n in pairs], dtype=np.int64)
    return coalesce(start, start + size, **limits)


@given(ranges, st.integers(0, 100), st.integers(1, 1000), st.integers(1, 400))
def test_each_range_lies_whole_in_its_read(pairs, gap, limit, alone):
    reads = merged(pairs, gap_bytes=gap, limit_bytes=limit, alone_bytes=alone)
    for (start, size), read, offset in zip(pairs, reads.read, reads.offset, strict=True):
        assert reads.start[read] + offset == start
        assert offset >= 0
        assert start + size <= reads.stop[read]


@given(ranges, st.integers(0, 100), st.integers(1, 1000), st.integers(1, 400))
def test_a_read_is_never_longer_than_the_limit_and_one_range(pairs, gap, limit, alone):
    reads = merged(pairs, gap_bytes=gap, limit_bytes=limit, alone_bytes=alone)
    largest = max((size for _, size in pairs), default=0)
    assert np.all(reads.stop - reads.start < limit + max(largest, 1))
    assert np.all(np.diff(reads.start) >= 0)


@given(ranges, st.integers(0, 100))
def test_no_read_spans_a_gap_wider_than_allowed(pairs, gap):
    reads = merged(pairs, gap_bytes=gap, limit_bytes=10**6, alone_bytes=10**6)
    wanted = np.zeros(2400, dtype=bool)
    for start, size in pairs:
        wanted[start : start + size] = True
        wanted[start : start + 1] |= size == 0
    for start, stop in zip(reads.start, reads.stop, strict=True):
        in_vain = "".join("x" if byte else "." for byte in wanted[start:stop])
        assert max((len(run) for run in in_vain.split("x")), default=0) <= gap


def test_neighbours_become_one_read_and_far_ones_do_not():
    reads = merged([(1000, 10), (0, 10), (30, 10)], gap_bytes=20)
    assert reads.start.tolist() == [0, 1000]
    assert reads.stop.tolist() == [40, 1010]
    assert reads.read.tolist() == [1, 0, 0]
    assert reads.offset.tolist() == [0, 0, 30]


def test_a_long_range_is_read_by_itself_so_that_it_need_not_be_copied():
    reads = merged([(0, 10), (10, 500), (510, 10), (520, 10)], alone_bytes=500)
    assert list(zip(reads.start.tolist(), reads.stop.tolist(), strict=True)) == [(0, 10), (10, 510), (510, 530)]


def test_nothing_asked_for_is_no_read():
    assert len(merged([]).start) == 0
