from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.order.mixture_accesses import MixtureRows
from cacheloader.order.mixture_order import MixtureOrder
from cacheloader.order.mixture_schedule import phases_of
from cacheloader.order.mixture_shares import BLOCK_ROWS, Shares
from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder

from .cases import thorough
from .mixture_cases import Mix, mixes


def readings(mix: Mix, *, rows: range, lanes: range):
    """For each source the rows in which these lanes read each of its shards."""
    order, sources = mix.order, mix.sources
    read: list[dict[int, set[int]]] = [{} for _ in sources]
    row = np.arange(rows.start, rows.stop)
    for lane in lanes:
        source, turn = order.locate(np.full(len(row), lane), row)
        for number, own in enumerate(sources):
            at = np.flatnonzero(source == number)
            length = int(own.lane_lengths(lane, lane + 1)[0])
            epochs = turn[at] // length
            for epoch in np.unique(epochs).tolist():
                of_epoch = at[epochs == epoch]
                shard, _ = own.locate(
                    epoch=epoch,
                    lane=np.full(len(of_epoch), lane),
                    row=turn[of_epoch] % length,
                    first_lane=lanes.start,
                    stop_lane=lanes.stop,
                )
                for one, when in zip(shard.tolist(), row[of_epoch].tolist(), strict=True):
                    read[number].setdefault(one, set()).add(when)
    return read


@thorough
@given(mixes(), st.data())
def test_every_reading_lies_in_an_access_of_its_shard_and_no_other_shard_has_one_nearby(mix: Mix, data):
    first_lane = data.draw(st.integers(0, mix.lanes - 1))
    lanes = range(first_lane, data.draw(st.integers(first_lane + 1, mix.lanes)))
    start = data.draw(st.integers(0, 3 * BLOCK_ROWS))
    rows = range(start, start + data.draw(st.integers(1, 3 * BLOCK_ROWS)))
    bounds = MixtureRows(
        mix.order,
        from_row=rows.start,
        stop_row=rows.stop,
        first_lane=lanes.start,
        stop_lane=lanes.stop,
        exact_patterns=data.draw(st.sampled_from((0, 2, 100))),
    )
    for number, read in enumerate(readings(mix, rows=rows, lanes=lanes)):
        accesses = bounds.accesses(number, mix.sources[number])
        needed: dict[int, set[int]] = {}
        for shard, first, stop in zip(
            accesses.shard.tolist(), accesses.first_row.tolist(), accesses.stop_row.tolist(), strict=True
        ):
            assert rows.start <= first < stop <= rows.stop
            needed.setdefault(shard, set()).update(range(first, stop))
        for shard, when in read.items():
            assert needed.get(shard, set()).issuperset(when)
        assert (np.diff(accesses.first_row) >= 0).all()
        assert accesses.shard.dtype == np.int32
        assert accesses.first_row.dtype == accesses.stop_row.dtype == np.int64


def two_sources(*, samples_per_shard=500, num_shards=40, lanes=2, window=1):
    phases = phases_of({"a": 0.25, "b": 0.75}, [], names="ab", lanes=lanes)
    order = MixtureOrder(Shares(phases), seed=3, lanes=lanes, epoch_rows=10**6)
    own = SampleOrder(np.full(num_shards, samples_per_shard), OrderOptions(seed=1, lanes=lanes, shuffle_window=window))
    return order, own


def test_where_patterns_are_laid_out_accesses_begin_and_end_with_readings():
    order, own = two_sources()
    rows = MixtureRows(order, from_row=100, stop_row=100 + 8 * BLOCK_ROWS, first_lane=1, stop_lane=2)
    accesses = rows.accesses(1, own)
    row = np.arange(100, 100 + 8 * BLOCK_ROWS)
    source, turn = order.locate(np.ones_like(row), row)
    mine = source == 1
    edges = row[mine][(turn[mine] % 500 == 0) | (turn[mine] % 500 == 499)]

    inner = set(accesses.first_row[1:].tolist()) | {stop - 1 for stop in accesses.stop_row[:-1].tolist()}
    assert inner <= set(edges.tolist())
    held = [np.sum((accesses.first_row <= at) & (at < accesses.stop_row)) for at in range(100, 20_000, 37)]
    assert max(held) == 1


def test_far_off_accesses_are_those_of_whole_blocks():
    order, own = two_sources()
    rows = MixtureRows(order, from_row=0, stop_row=50 * BLOCK_ROWS, first_lane=0, stop_lane=2, exact_patterns=2)
    accesses = rows.accesses(0, own)
    far = accesses.first_row > 2 * BLOCK_ROWS

    assert far.sum() > 10
    assert (accesses.first_row[far] % BLOCK_ROWS == 0).all()
    assert (accesses.stop_row - accesses.first_row).max() <= 4 * BLOCK_ROWS


def test_a_source_that_is_over_within_a_block_is_needed_all_the_time():
    order, own = two_sources(num_shards=6, samples_per_shard=100)
    rows = MixtureRows(order, from_row=7, stop_row=10**6, first_lane=0, stop_lane=1)
    accesses = rows.accesses(1, own)

    assert sorted(accesses.shard.tolist()) == sorted(own.lane_reads(epoch=0, first_lane=0, stop_lane=1).shard.tolist())
    assert set(accesses.first_row.tolist()) == {7}
    assert set(accesses.stop_row.tolist()) == {10**6}


def test_a_source_that_pauses_needs_nothing():
    phases = phases_of({"a": 1, "b": 0}, [], names="ab", lanes=1)
    order = MixtureOrder(Shares(phases), seed=3, lanes=1, epoch_rows=1000)
    own = SampleOrder(np.full(4, 10), OrderOptions())

    assert len(MixtureRows(order, from_row=0, stop_row=9999, first_lane=0, stop_lane=1).accesses(1, own)) == 0


def test_a_plan_over_billions_of_rows_lays_out_no_more_patterns_than_one_over_few():
    order, own = two_sources(samples_per_shard=10**6, num_shards=10_000)
    calls = []
    plain = order.pattern
    order.pattern = lambda lane, block: calls.append((lane, block)) or plain(lane, block)
    rows = MixtureRows(order, from_row=10**9, stop_row=10**9 + 4 * 10**9, first_lane=0, stop_lane=2)
    accesses = rows.accesses(0, own)

    assert len(accesses) > 1000
    assert len(calls) <= 128
    assert math.isclose(accesses.stop_row.max(), 5 * 10**9, rel_tol=1e-6)
