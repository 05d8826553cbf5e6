from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.order.lanes import LaneCut, shard_order
from cacheloader.order.options import OrderOptions

from .cases import datasets, seeds, thorough

REDEALS = st.sampled_from([0.01, 0.05, 0.1, 0.25, 1 / 3, 0.37, 0.5, 0.75, 1.0])


def home_lanes(*, shards: int, options: OrderOptions, epoch: int) -> np.ndarray:
    """The lane of each shard when shards are of one size and lanes hold whole shards."""
    lanes = np.empty(shards, dtype=np.int64)
    lanes[shard_order(shards, options=options, epoch=epoch)] = np.arange(shards) * options.lanes // shards
    return lanes


@thorough
@given(st.integers(0, 300), seeds, REDEALS, st.integers(0, 50))
def test_every_epoch_lays_each_shard_down_once(num_shards, seed, redeal, epoch):
    order = shard_order(num_shards, options=OrderOptions(seed=seed, lanes=2, redeal=redeal), epoch=epoch)

    assert sorted(order.tolist()) == list(range(num_shards))


def test_without_shuffle_shards_lie_in_the_order_of_the_data_set():
    assert shard_order(5, options=OrderOptions(shuffle=False), epoch=3).tolist() == [0, 1, 2, 3, 4]


@thorough
@given(datasets, seeds, st.integers(1, 12))
def test_lanes_are_consecutive_cuts_whose_lengths_differ_by_one_at_most(samples_per_shard, seed, lanes):
    order = shard_order(len(samples_per_shard), options=OrderOptions(seed=seed), epoch=0)
    cut = LaneCut.of(samples_per_shard, order, lanes=lanes)

    lengths = np.diff(cut.lane_start)
    quotient, remainder = divmod(int(samples_per_shard.sum()), lanes)
    assert lengths.tolist() == [quotient + 1] * remainder + [quotient] * (lanes - remainder)
    stream = [(shard, i) for shard in order.tolist() for i in range(int(samples_per_shard[shard]))]
    told = [
        (shard, first + i)
        for shard, first, size in zip(
            cut.piece_shard.tolist(), cut.piece_sample.tolist(), np.diff(cut.piece_start).tolist(), strict=True
        )
        for i in range(size)
    ]
    assert told == stream
    assert (np.diff(cut.piece_start) > 0).all()
    np.testing.assert_array_equal(cut.piece_start[cut.lane_piece], cut.lane_start)


@thorough
@given(seeds, st.integers(0, 100))
def test_without_redeal_shards_stay_in_their_lanes(seed, epoch):
    options = OrderOptions(seed=seed, lanes=4)

    np.testing.assert_array_equal(
        home_lanes(shards=40, options=options, epoch=epoch), home_lanes(shards=40, options=options, epoch=0)
    )


@pytest.mark.parametrize("redeal", [0.01, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("epoch", [0, 1, 7, 1000])
def test_redeal_moves_about_its_fraction_of_the_shards_from_epoch_to_epoch(redeal, epoch):
    options = OrderOptions(seed=5, lanes=32, redeal=redeal)
    before = home_lanes(shards=3200, options=options, epoch=epoch)
    after = home_lanes(shards=3200, options=options, epoch=epoch + 1)

    # One in 32 of the shards that are dealt comes back to its lane.
    assert np.mean(before != after) == pytest.approx(redeal * 31 / 32, rel=0.15)


def test_redeal_reaches_every_shard_in_time():
    options = OrderOptions(seed=5, lanes=32, redeal=0.1)
    lanes = [home_lanes(shards=640, options=options, epoch=epoch) for epoch in range(41)]

    assert (np.array(lanes) != lanes[0]).any(axis=0).all()


def test_redeal_moves_shards_even_where_there_are_few():
    options = OrderOptions(seed=5, lanes=4, redeal=0.01)
    lanes = [home_lanes(shards=12, options=options, epoch=epoch) for epoch in range(4)]

    assert (lanes[0] != lanes[1]).any()
