from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ConfigError
from cacheloader.order.mixture_schedule import WeightsFrom
from cacheloader.order.mixture_shares import BLOCK_ROWS

from .cases import thorough
from .mixture_cases import Mix, mixes, order_of, told

if TYPE_CHECKING:
    from cacheloader.order.mixture_order import MixtureOrder


def step(order: MixtureOrder, *, epoch: int, row: int, global_batch: int, world_size: int = 1) -> dict[str, list[int]]:
    """One step of all ranks, rank behind rank."""
    parts = [
        order.batch(epoch=epoch, row=row, global_batch=global_batch, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    return {name: [v for p in parts for v in getattr(p, name).tolist()] for name in ("source", "turn", "lane", "row")}


@thorough
@given(mixes(), st.data())
def test_seeking_gives_what_counting_place_by_place_gives(mix: Mix, data):
    lane = data.draw(st.integers(0, mix.lanes - 1))
    places = told(mix, lane=lane, num_rows=3 * BLOCK_ROWS)
    row = np.array(data.draw(st.lists(st.integers(0, 3 * BLOCK_ROWS - 1), max_size=40)), dtype=np.int64)
    source, turn = mix.order.locate(np.full(len(row), lane), row)

    assert list(zip(source.tolist(), turn.tolist(), strict=True)) == [places[at] for at in row.tolist()]


@thorough
@given(mixes(), st.data())
def test_ranks_and_batch_ramps_walk_every_row_of_every_lane_once_over_any_number_of_epochs(mix: Mix, data):
    """The first steps with another world and batch each time: rows, sources and turns are those of a plain walk."""
    order = mix.order
    epoch = row = 0
    walked: dict[int, list[tuple[int, int, int]]] = {lane: [] for lane in range(mix.lanes)}
    for _ in range(data.draw(st.integers(1, 12))):
        world_size = data.draw(st.integers(1, 4))
        batch = math.lcm(world_size, mix.lanes) * data.draw(st.integers(1, 300))
        if not order.steps_remaining(row=row, global_batch=batch):
            epoch, row = order.next_epoch(epoch=epoch, row=row, global_batch=batch)
        taken = step(order, epoch=epoch, row=row, global_batch=batch, world_size=world_size)
        for source, turn, lane, at in zip(*taken.values(), strict=True):
            walked[lane].append((at, source, turn))
        row += order.rows_per_step(batch)
    for lane, places in walked.items():
        expected = told(mix, lane=lane, num_rows=len(places))
        assert places == [(at, *place) for at, place in enumerate(expected)]


@thorough
@given(mixes(), st.integers(1, 4), st.integers(1, 40), st.integers(0, 3))
def test_ranks_cut_the_step_of_one_rank_evenly_and_in_order(mix: Mix, world_size, factor, epoch):
    order = mix.order
    batch = math.lcm(world_size, mix.lanes) * factor
    for row in {0, (order.steps_remaining(row=0, global_batch=batch) - 1) * order.rows_per_step(batch)}:
        alone = step(order, epoch=epoch, row=row, global_batch=batch)
        together = step(order, epoch=epoch, row=row, global_batch=batch, world_size=world_size)
        assert together == alone
        if mix.tail == "carry":
            assert len(alone["row"]) == batch


@thorough
@given(mixes(), st.data())
def test_the_places_of_a_source_in_a_lane_read_each_of_its_epochs_completely_and_in_its_own_order(mix: Mix, data):
    lane = data.draw(st.integers(0, mix.lanes - 1))
    row = np.arange(3 * BLOCK_ROWS)
    source, turn = mix.order.locate(np.full(len(row), lane), row)
    for number, own in enumerate(mix.sources):
        assert turn[source == number].tolist() == list(range(int((source == number).sum())))
        length = int(own.lane_lengths(lane, lane + 1)[0])
        epochs = len(turn[source == number]) // length
        for epoch in {0, epochs - 1} if epochs else ():
            at = turn[source == number][epoch * length : (epoch + 1) * length]
            located = own.locate(
                epoch=epoch, lane=np.full(length, lane), row=at % length, first_lane=lane, stop_lane=lane + 1
            )
            read = list(zip(located[0].tolist(), located[1].tolist(), strict=True))
            assert len(set(read)) == length
            if own.options.redeal == 0:
                reads = own.lane_reads(epoch=epoch, first_lane=lane, stop_lane=lane + 1)
                assert {shard for shard, _ in read} == set(reads.shard.tolist())


@thorough
@given(mixes(), st.integers(0, 5))
def test_all_lanes_together_read_each_sample_of_a_source_once_an_epoch(mix: Mix, epoch):
    for own, sizes in zip(mix.sources, mix.samples_per_shard, strict=True):
        lengths = own.lane_lengths(0, mix.lanes)
        lane = np.repeat(np.arange(mix.lanes), lengths)
        row = np.concatenate([np.arange(length) for length in lengths])
        shard, sample = own.locate(epoch=epoch, lane=lane, row=row, first_lane=0, stop_lane=mix.lanes)
        everything = [(shard, i) for shard, size in enumerate(sizes.tolist()) for i in range(size)]
        assert sorted(zip(shard.tolist(), sample.tolist(), strict=True)) == everything


def test_every_lane_has_the_same_counts_in_every_block_and_another_order():
    order = order_of(lanes=3, a=0.7, b=0.3)
    row = np.arange(2 * BLOCK_ROWS)
    lanes = [order.locate(np.full(len(row), lane), row)[0] for lane in range(3)]

    for block in np.split(np.array(lanes), 2, axis=1):
        assert len({int(sources.sum()) for sources in block}) == 1
    assert (lanes[0] != lanes[1]).any()


def test_a_step_that_does_not_fit_goes_on_into_the_next_epoch_which_starts_behind_it():
    order = order_of(epoch_rows=10, a=1, b=1)

    assert order.steps_remaining(row=0, global_batch=8) == 3
    assert order.next_epoch(epoch=4, row=0, global_batch=8) == (5, 2)
    assert order.steps_remaining(row=2, global_batch=8) == 2
    assert order.next_epoch(epoch=5, row=2, global_batch=8) == (6, 0)
    over = order.batch(epoch=4, row=8, global_batch=8, rank=0, world_size=1)
    assert over.row.tolist() == [48, 49, 50, 51] * 2


def test_a_step_larger_than_an_epoch_skips_the_epochs_that_it_has_read():
    order = order_of(epoch_rows=3, a=1, b=1)

    assert order.steps_remaining(row=0, global_batch=20) == 1
    assert order.next_epoch(epoch=0, row=0, global_batch=20) == (3, 1)


def test_keep_ends_with_a_smaller_step_and_the_next_epoch_starts_at_its_first_row():
    order = order_of(epoch_rows=10, tail="keep", a=1, b=1)

    assert order.next_epoch(epoch=4, row=8, global_batch=8) == (5, 0)
    assert order.batch(epoch=4, row=8, global_batch=8, rank=0, world_size=1).row.tolist() == [48, 49] * 2
    assert order.rank_samples_remaining(row=0, global_batch=8, rank=0, world_size=1) == 20


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_tails_that_would_lose_or_repeat_samples_are_refused(tail):
    with pytest.raises(ConfigError, match='pass "carry"'):
        order_of(tail=tail, a=1)


def test_a_change_of_weights_ahead_does_not_move_what_comes_before_it():
    plain = order_of(a=0.5, b=0.5)
    changed = order_of(a=0.5, b=0.5, schedule=[WeightsFrom(rows=5000, weights={"a": 1, "b": 0})])
    row = np.arange(3 * BLOCK_ROWS)
    one, other = (np.array(order.locate(np.zeros_like(row), row)) for order in (plain, changed))

    np.testing.assert_array_equal(one[:, : 2 * BLOCK_ROWS], other[:, : 2 * BLOCK_ROWS])
    assert (other[0, 2 * BLOCK_ROWS :] == 0).all()
    assert other[1, 2 * BLOCK_ROWS] == BLOCK_ROWS


def test_any_position_costs_the_same_number_of_patterns():
    for row in (0, 10**12):
        order = order_of(lanes=4, epoch_rows=10**13, a=0.7, b=0.3)
        order.batch(epoch=3, row=row, global_batch=64, rank=0, world_size=2)
        assert len(order._patterns) <= 2 * 2


def test_what_is_remembered_between_steps_stays_bounded():
    order = order_of(lanes=2, epoch_rows=10**9, a=0.7, b=0.3)
    for block in range(200):
        order.batch(epoch=0, row=block * BLOCK_ROWS, global_batch=2, rank=0, world_size=1)

    assert len(order._patterns) <= 2 * 2 + 64
