from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.order.lanes import LaneCut, shard_order
from cacheloader.order.options import OrderOptions
from cacheloader.order.windows import EpochWindows

from .cases import datasets, options, thorough
from .model import lane_windows


def layout(samples_per_shard, chosen: OrderOptions, *, epoch: int, first: int = 0, stop: int | None = None):
    order = shard_order(len(samples_per_shard), options=chosen, epoch=epoch)
    cut = LaneCut.of(samples_per_shard, order, lanes=chosen.lanes)
    stop = chosen.lanes if stop is None else stop
    return EpochWindows.of(cut, options=chosen, epoch=epoch, first_lane=first, stop_lane=stop)


@thorough
@given(datasets, options(), st.integers(0, 9), st.data())
def test_windows_hold_what_the_rules_say_told_sample_by_sample(samples_per_shard, chosen, epoch, data):
    first = data.draw(st.integers(0, chosen.lanes - 1))
    stop = data.draw(st.integers(first + 1, chosen.lanes))
    windows = layout(samples_per_shard, chosen, epoch=epoch, first=first, stop=stop)

    for lane, expected in enumerate(lane_windows(samples_per_shard, chosen, epoch)[first:stop], first):
        samples = [sample for window in expected for sample in window]
        rows = np.arange(len(samples))
        shard, sample = windows.locate(np.full(len(samples), lane), rows)
        assert list(zip(shard.tolist(), sample.tolist(), strict=True)) == samples


@thorough
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5))
def test_windows_double_up_to_the_shuffle_window_in_every_lane(num_shards, shuffle_window, lanes):
    chosen = OrderOptions(lanes=lanes, shuffle_window=shuffle_window)
    windows = layout(np.full(num_shards, 5), chosen, epoch=1)

    pieces = np.diff(windows.window_piece)
    assert pieces.max() <= shuffle_window
    lane = np.searchsorted(windows.lane_start, windows.window_start[:-1], side="right") - 1
    for number in range(lanes):
        own = pieces[lane == number].tolist()
        full = [min(2**i, shuffle_window) for i in range(len(own))]
        assert own[:-1] == full[:-1]
        assert own[-1] <= full[-1]


def test_the_first_rows_of_a_lane_need_one_shard_and_the_next_ones_two():
    chosen = OrderOptions(seed=8, shuffle_window=4)
    windows = layout(np.full(10, 100), chosen, epoch=0)
    shard, _ = windows.locate(np.zeros(1000, dtype=np.int64), np.arange(1000))

    assert len(set(shard[:100].tolist())) == 1
    assert len(set(shard[100:300].tolist())) == 2
    assert len(set(shard[300:700].tolist())) == 4
    # Mixed, not one after the other.
    assert len(set(shard[300:350].tolist())) == 4


def test_permutations_kept_for_small_windows_stay_few_through_a_long_epoch():
    chosen = OrderOptions(shuffle_window=1)
    windows = layout(np.full(500, 3), chosen, epoch=0)
    for row in range(0, 1500, 3):
        windows.locate(np.zeros(3, dtype=np.int64), np.arange(row, row + 3))

    assert len(windows._permutations) <= 20
