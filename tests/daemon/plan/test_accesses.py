"""The lookup of one plan against a search through all its accesses."""

from __future__ import annotations

import numpy as np
import pytest
from cacheloader_daemon.plan.accesses import NEVER, AccessTable, plan_digest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ProtocolError

Access = tuple[int, int, int]


def table_of(accesses: list[Access], *, num_shards: int, sizes: list[int] | None = None) -> AccessTable:
    return AccessTable(
        digest=b"",
        first_clock=np.array([first for first, _, _ in accesses], dtype=np.int64),
        stop_clock=np.array([stop for _, stop, _ in accesses], dtype=np.int64),
        shard=np.array([shard for _, _, shard in accesses], dtype=np.int32),
        canonical=np.arange(num_shards, dtype=np.int32),
        reserve_bytes=np.array(sizes or [1] * num_shards, dtype=np.int64),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[Access]]:
    num_shards = draw(st.integers(1, 6))
    accesses = draw(
        st.lists(
            st.tuples(st.integers(0, 40), st.integers(1, 15), st.integers(0, num_shards - 1)).map(
                lambda row: (row[0], row[0] + row[1], row[2])
            ),
            max_size=25,
        )
    )
    return num_shards, sorted(accesses)


@given(plans(), st.integers(0, 60))
def test_next_access_is_the_first_that_is_not_over(plan: tuple[int, list[Access]], clock: int) -> None:
    num_shards, accesses = plan
    table = table_of(accesses, num_shards=num_shards)
    for shard in range(num_shards):
        coming = [first for first, stop, of in accesses if of == shard and stop > clock]
        assert table.next_first(shard, clock) == (coming[0] if coming else NEVER)
        assert table.uses(shard) == any(of == shard for _, _, of in accesses)
        access = table.next_access(shard, clock)
        assert access == next(
            (place for place, (_, stop, of) in enumerate(accesses) if of == shard and stop > clock), len(accesses)
        )
        if access < len(accesses):
            assert (table.first_of(access), table.shard_of(access)) == (coming[0], shard)


@given(plans(), st.integers(0, 60))
def test_many_lookups_at_once_are_as_many_single_ones(plan: tuple[int, list[Access]], clock: int) -> None:
    num_shards, accesses = plan
    table = table_of(accesses, num_shards=num_shards)
    some = np.array([*range(num_shards), 0, num_shards - 1], dtype=np.int64)
    assert table.next_firsts(some, clock).tolist() == [table.next_first(int(shard), clock) for shard in some]


@given(plans(), st.integers(0, 60), st.integers(0, 30), st.data())
def test_next_missing_skips_what_is_over_and_what_is_present(
    plan: tuple[int, list[Access]], clock: int, start: int, data: st.DataObject
) -> None:
    num_shards, accesses = plan
    table = table_of(accesses, num_shards=num_shards)
    present = np.array(data.draw(st.lists(st.integers(0, 1), min_size=num_shards, max_size=num_shards)), dtype=np.uint8)
    expected = next(
        (
            place
            for place, (_, stop, shard) in enumerate(accesses)
            if place >= start and stop > clock and not present[shard]
        ),
        len(accesses),
    )
    assert table.next_missing(present, start, clock) == expected


@given(plans(), st.lists(st.integers(0, 60), max_size=5).map(sorted))
def test_each_access_is_reported_over_once_and_in_time(plan: tuple[int, list[Access]], clocks: list[int]) -> None:
    num_shards, accesses = plan
    table = table_of(accesses, num_shards=num_shards)
    num_over = 0
    for clock in clocks:
        before, num_over = num_over, table.num_over(clock, start=num_over)
        assert num_over == sum(stop <= clock for _, stop, _ in accesses)
        passed = sorted(table.shard_by_stop[before:num_over].tolist())
        earlier = sorted(shard for _, stop, shard in accesses if stop <= clock)
        for shard in sorted(table.shard_by_stop[:before].tolist()):
            earlier.remove(shard)
        assert passed == earlier


@given(plans(), st.lists(st.integers(1, 100), min_size=6, max_size=6))
def test_peak_is_the_most_that_any_row_needs_with_each_shard_counted_once(
    plan: tuple[int, list[Access]], sizes: list[int]
) -> None:
    num_shards, accesses = plan
    peak = table_of(accesses, num_shards=num_shards, sizes=sizes[:num_shards]).peak

    def needed(clock: int) -> set[int]:
        return {shard for first, stop, shard in accesses if first <= clock < stop}

    assert peak.size_bytes == max((sum(sizes[shard] for shard in needed(clock)) for clock in range(60)), default=0)
    if accesses:
        assert peak.size_bytes == sum(sizes[shard] for shard in needed(peak.clock))
        assert peak.num_shards == len(needed(peak.clock))


def test_a_window_that_ends_where_the_next_begins_does_not_add_to_it() -> None:
    peak = table_of([(0, 10, 0), (0, 10, 1), (10, 20, 2), (10, 20, 3)], num_shards=4, sizes=[5, 5, 6, 6]).peak
    assert (peak.size_bytes, peak.clock, peak.num_shards) == (12, 10, 2)


def test_largest_clocks_that_a_client_may_send_do_not_overflow() -> None:
    table = table_of([(0, 2**62, 0), (2**62, 2**62 + 1, 1), (2**62, 2**62 + 1, 2)], num_shards=3)
    assert table.peak.size_bytes == 2
    assert table.next_first(1, 2**61) == 2**62


def test_one_object_named_twice_is_one_shard() -> None:
    table = AccessTable(
        digest=b"",
        first_clock=np.array([0, 5], dtype=np.int64),
        stop_clock=np.array([9, 9], dtype=np.int64),
        shard=np.array([1, 0], dtype=np.int32),
        canonical=np.array([0, 0], dtype=np.int32),
        reserve_bytes=np.array([7, 7], dtype=np.int64),
    )
    assert table.next_first(0, 0) == 0
    assert table.peak.size_bytes == 7


def test_later_changes_of_the_callers_arrays_do_not_reach_the_table() -> None:
    first, stop, shard = (np.array(column) for column in ([0], [9], [0]))
    table = AccessTable(
        digest=b"",
        first_clock=first,
        stop_clock=stop,
        shard=shard.astype(np.int32),
        canonical=np.zeros(1, dtype=np.int32),
        reserve_bytes=np.ones(1, dtype=np.int64),
    )
    stop[0] = 1
    assert table.next_first(0, 5) == 0


@pytest.mark.parametrize(
    ("accesses", "says"),
    [
        ([(5, 9, 0), (4, 9, 0)], "not sorted"),
        ([(-1, 9, 0)], "negative"),
        ([(5, 5, 0)], "stops before it begins"),
        ([(5, 6, 3)], "of a data set of 3 shards"),
        ([(5, 6, -1)], "of a data set of 3 shards"),
    ],
)
def test_arrays_that_are_no_plan_are_refused(accesses: list[Access], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        table_of(accesses, num_shards=3)


def test_arrays_of_unequal_length_are_refused() -> None:
    with pytest.raises(ProtocolError, match="equally long"):
        AccessTable(
            digest=b"",
            first_clock=np.zeros(1, dtype=np.int64),
            stop_clock=np.ones(2, dtype=np.int64),
            shard=np.zeros(1, dtype=np.int32),
            canonical=np.zeros(1, dtype=np.int32),
            reserve_bytes=np.ones(1, dtype=np.int64),
        )


def test_digest_tells_plans_apart_and_equal_ones_not() -> None:
    one, two = np.array([1, 2], dtype=np.int64), np.array([2, 3], dtype=np.int64)
    shard = np.array([0, 1], dtype=np.int32)
    assert plan_digest(one, two, shard) == plan_digest(one.copy(), two.copy(), shard.copy())
    assert plan_digest(one, two, shard) != plan_digest(one, two, shard[::-1].copy())
    assert plan_digest(one, two, shard[:1]) != plan_digest(one[:1], two, shard)
