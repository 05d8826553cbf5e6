from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.order.mixture_accesses import source_accesses
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
    for number, read in enumerate(readings(mix, rows=rows, lanes=lanes)):
        accesses = source_accesses(
            mix.shares,
            number,
            mix.sources[number],
            from_row=rows.start,
            stop_row=rows.stop,
            first_lane=lanes.start,
            stop_lane=lanes.stop,
        )
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


def test_an_access_is_little_longer_than_the_readings_of_its_window():
    order, own = two_sources()
    rows = {"from_row": 100, "stop_row": 100 + 8 * BLOCK_ROWS}
    accesses = source_accesses(order.shares, 1, own, **rows, first_lane=1, stop_lane=2)
    row = np.arange(rows["from_row"], rows["stop_row"])
    source, turn = order.locate(np.ones_like(row), row)
    mine = source == 1
    opens = row[mine][turn[mine] % 500 == 0]
    closes = row[mine][turn[mine] % 500 == 499]

    assert (np.abs(accesses.first_row[1 : len(opens) + 1] - opens) < 300).all()
    assert (np.abs(accesses.stop_row[: len(closes)] - closes) < 300).all()
    held = [np.sum((accesses.first_row <= at) & (at < accesses.stop_row)) for at in range(100, 20_000, 37)]
    assert max(held) == 2


def test_a_source_that_is_read_very_often_is_needed_all_the_time():
    order, own = two_sources(num_shards=6, samples_per_shard=100)
    accesses = source_accesses(order.shares, 1, own, from_row=7, stop_row=10**6, first_lane=0, stop_lane=1)

    assert sorted(accesses.shard.tolist()) == sorted(own.lane_reads(epoch=0, first_lane=0, stop_lane=1).shard.tolist())
    assert set(accesses.first_row.tolist()) == {7}
    assert set(accesses.stop_row.tolist()) == {10**6}


def test_a_source_that_pauses_needs_nothing():
    phases = phases_of({"a": 1, "b": 0}, [], names="ab", lanes=1)
    own = SampleOrder(np.full(4, 10), OrderOptions())
    accesses = source_accesses(Shares(phases), 1, own, from_row=0, stop_row=9999, first_lane=0, stop_lane=1)

    assert len(accesses) == 0


def test_a_plan_over_billions_of_rows_costs_what_its_windows_cost():
    order, own = two_sources(samples_per_shard=10**6, num_shards=10_000)
    accesses = source_accesses(
        order.shares, 0, own, from_row=10**11, stop_row=10**11 + 4 * 10**9, first_lane=0, stop_lane=2
    )

    assert 2000 <= len(accesses) <= 2006
    assert accesses.first_row.min() == 10**11
    assert accesses.stop_row.max() == 10**11 + 4 * 10**9
