from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ProtocolError
from cacheloader.transport.direct_plan import Lookahead


def block(first: list[int], stop: list[int], shard: list[int]) -> bytes:
    return np.array(first, "<i8").tobytes() + np.array(stop, "<i8").tobytes() + np.array(shard, "<i4").tobytes()


def lookahead(accesses: list[tuple[int, int, int]], *, clock: int = 0, num_shards: int = 8) -> Lookahead:
    columns = [list(column) for column in zip(*accesses, strict=True)] or [[], [], []]
    return Lookahead.from_block(block(*columns), num_accesses=len(accesses), clock=clock, num_shards=num_shards)


def nothing(_: int) -> bool:
    return False


def test_next_shards_come_in_the_order_of_need_and_each_once():
    plan = lookahead([(0, 5, 3), (0, 9, 1), (5, 9, 3), (9, 12, 2)])
    assert plan.soon(2, skip=nothing) == [3, 1]
    assert plan.soon(9, skip=nothing) == [3, 1, 2]
    assert plan.soon(2, skip={3}.__contains__) == [1, 2]


def test_accesses_that_are_over_do_not_count():
    plan = lookahead([(0, 5, 3), (0, 20, 1), (5, 9, 4), (9, 12, 2)])
    plan.advance(9)
    assert plan.soon(9, skip=nothing) == [1, 2]
    plan.advance(20)
    assert plan.soon(9, skip=nothing) == []


def test_plan_that_starts_in_the_middle_starts_there():
    assert lookahead([(0, 5, 3), (5, 9, 4)], clock=5).soon(9, skip=nothing) == [4]


@pytest.mark.parametrize("shard", [-1, 8])
def test_shard_that_is_not_there_is_refused(shard):
    with pytest.raises(ProtocolError, match=str(shard)):
        lookahead([(0, 1, shard)])


def test_block_of_another_length_is_refused():
    with pytest.raises(ProtocolError, match="40 bytes, not 20"):
        Lookahead.from_block(block([0], [1], [0]), num_accesses=2, clock=0, num_shards=1)


accesses = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10), st.integers(0, 7)), max_size=20).map(
    lambda rows: sorted((first, first + length, shard) for first, length, shard in rows)
)


@given(accesses, st.lists(st.integers(0, 45), max_size=4).map(sorted), st.integers(1, 5), st.sets(st.integers(0, 7)))
def test_lookahead_is_what_a_plain_scan_finds(rows, clocks, count, skipped):
    plan = lookahead(rows)
    clock = 0
    for clock in clocks:
        plan.advance(clock)
    wanted = dict.fromkeys(shard for _, stop, shard in rows if stop > clock and shard not in skipped)
    assert plan.soon(count, skip=skipped.__contains__) == list(wanted)[:count]
