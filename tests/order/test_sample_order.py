from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ConfigError
from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder

from .cases import Case, assert_same, cases, datasets, pairs, seeds, thorough, walk, walk_case
from .model import lane_windows


def order_of(*samples_per_shard: int, **options) -> SampleOrder:
    return SampleOrder(np.array(samples_per_shard, dtype=np.int64), OrderOptions(**options))


def lane_sequences(steps) -> dict[int, list[tuple[int, int]]]:
    lanes: dict[int, list[tuple[int, int]]] = {}
    for _, batches in steps:
        for batch in batches:
            for lane, pair in zip(batch.lane.tolist(), pairs(batch), strict=True):
                lanes.setdefault(lane, []).append(pair)
    return lanes


@thorough
@given(cases(tails=("keep",)))
def test_keep_reads_every_sample_exactly_once(case: Case):
    batches = [batch for _, ranks in walk_case(case) for batch in ranks]

    assert sorted(pair for batch in batches for pair in pairs(batch)) == case.samples
    assert not any(batch.padded.any() for batch in batches)


@thorough
@given(cases(tails=("drop",)))
def test_drop_repeats_nothing_and_loses_less_than_a_step_from_the_end(case: Case):
    steps = list(walk_case(case))
    read = [pair for _, ranks in steps for batch in ranks for pair in pairs(batch)]

    assert len(set(read)) == len(read) == case.order.num_samples // case.global_batch * case.global_batch
    rows = len(steps) * case.order.rows_per_step(case.global_batch)
    lanes = lane_windows(case.samples_per_shard, case.options, case.epoch)
    assert sorted(read) == sorted(
        pair for windows in lanes for pair in [pair for window in windows for pair in window][:rows]
    )


@thorough
@given(cases(tails=("pad",)))
def test_pad_fills_every_rank_and_repeats_marked_samples_only(case: Case):
    order = case.order
    batches = [batch for _, ranks in walk_case(case) for batch in ranks]

    assert {len(batch) for batch in batches} == {case.global_batch // case.world_size}
    plain = [pair for batch in batches for pair in np.array(pairs(batch))[~batch.padded].tolist()]
    assert sorted(map(tuple, plain)) == case.samples
    turn = {}
    for batch in batches:
        for lane, row, padded, pair in zip(
            batch.lane.tolist(), batch.row.tolist(), batch.padded.tolist(), pairs(batch), strict=True
        ):
            # A sample added at the end is one that the epoch has read, under the lane and row of that reading.
            assert padded == ((lane, row) in turn)
            assert turn.setdefault((lane, row), pair) == pair
    assert sum(int(batch.padded.sum()) for batch in batches) < case.global_batch
    added = [batch.row[batch.padded] for batch in batches]
    last_step = order.rows_per_step(case.global_batch)
    assert all(rows.max(initial=0) < last_step for rows in added)


@thorough
@given(cases())
def test_places_are_those_of_the_rules_told_sample_by_sample(case: Case):
    lanes = lane_windows(case.samples_per_shard, case.options, case.epoch)
    sequences = [[pair for window in windows for pair in window] for windows in lanes]
    rows = case.global_batch // case.options.lanes
    for at, ranks in walk_case(case):
        expected = []
        for place in range(case.global_batch):
            sequence, row = sequences[place // rows], at + place % rows
            if row < len(sequence):
                expected.append(sequence[row])
            elif case.options.tail == "pad":
                sequence = sequence or sequences[place // rows % case.order.num_samples]
                expected.append(sequence[row % len(sequence)])
        assert [pair for batch in ranks for pair in pairs(batch)] == expected


@thorough
@given(datasets)
def test_without_shuffle_the_order_is_that_of_the_data_set_in_every_epoch(samples_per_shard):
    case = Case(
        samples_per_shard=samples_per_shard,
        options=OrderOptions(shuffle=False, tail="keep"),
        epoch=3,
        world_size=1,
        global_batch=97,
    )

    assert [pair for _, [batch] in walk_case(case) for pair in pairs(batch)] == case.samples


def test_epochs_seeds_and_lanes_each_give_another_order():
    sizes = [300] * 12
    base = order_of(*sizes, seed=1, lanes=2, shuffle_window=3)
    sequences = {
        name: [pair for _, [batch] in walk(order, epoch=epoch, global_batch=60) for pair in pairs(batch)]
        for name, order, epoch in (
            ("base", base, 0),
            ("again", order_of(*sizes, seed=1, lanes=2, shuffle_window=3), 0),
            ("next epoch", base, 1),
            ("other seed", order_of(*sizes, seed=2, lanes=2, shuffle_window=3), 0),
            ("other lanes", order_of(*sizes, seed=1, lanes=3, shuffle_window=3), 0),
        )
    }

    assert sequences["again"] == sequences["base"]
    for name in ("next epoch", "other seed", "other lanes"):
        same = [a == b for a, b in zip(sequences[name], sequences["base"], strict=True)]
        assert np.mean(same) < 0.05, name


def test_lanes_mix_their_samples_each_in_its_own_way():
    order = order_of(*[300] * 12, seed=1, lanes=4, shuffle_window=3)
    lanes = lane_sequences(walk(order, epoch=0, global_batch=60))

    for lane in (1, 2, 3):
        same = [a == b for (_, a), (_, b) in zip(lanes[0], lanes[lane], strict=True)]
        assert np.mean(same) < 0.05


@thorough
@given(datasets, seeds, st.integers(1, 5), st.integers(1, 30))
def test_lanes_hold_the_same_samples_in_every_epoch(samples_per_shard, seed, lanes, epoch):
    order = SampleOrder(samples_per_shard, OrderOptions(seed=seed, lanes=lanes, tail="keep"))
    batch = lanes * (1 + order.rows_per_epoch // 20)
    first, later = (lane_sequences(walk(order, epoch=e, global_batch=batch)) for e in (0, epoch))

    assert {lane: sorted(samples) for lane, samples in first.items()} == {
        lane: sorted(samples) for lane, samples in later.items()
    }


@thorough
@given(cases())
def test_ranks_cut_the_step_of_one_rank_evenly_and_in_order(case: Case):
    alone = list(walk(case.order, epoch=case.epoch, global_batch=case.global_batch))
    together = list(walk_case(case))

    assert len(alone) == len(together)
    for (_, [whole]), (at, ranks) in zip(alone, together, strict=True):
        for name in ("shard", "sample", "lane", "row", "padded"):
            np.testing.assert_array_equal(
                np.concatenate([getattr(rank, name) for rank in ranks]), getattr(whole, name), err_msg=name
            )
        is_last = at == together[-1][0]
        if case.options.tail != "keep" or not is_last:
            assert {len(rank) for rank in ranks} == {case.global_batch // case.world_size}


@thorough
@given(cases(), st.integers(1, 7), st.data())
def test_workers_take_every_batch_once_and_in_turn(case: Case, num_workers, data):
    order = case.order
    row = data.draw(st.integers(0, order.rows_per_epoch))
    shares = [
        order.worker_rows(row=row, global_batch=case.global_batch, worker=worker, num_workers=num_workers)
        for worker in range(num_workers)
    ]

    steps = order.steps_remaining(row=row, global_batch=case.global_batch)
    taken = [shares[k % num_workers][k // num_workers] for k in range(steps)]
    assert taken == [row + k * order.rows_per_step(case.global_batch) for k in range(steps)]
    assert sum(map(len, shares)) == steps


@thorough
@given(cases(), st.data())
def test_batch_sizes_may_change_at_any_step_without_a_repeat_or_a_gap(case: Case, data):
    order, lanes = case.order, case.options.lanes
    sequences = [
        [pair for window in windows for pair in window]
        for windows in lane_windows(case.samples_per_shard, case.options, case.epoch)
    ]
    row = 0
    for _ in range(6):
        world_size = data.draw(st.integers(1, 4))
        batch = math.lcm(world_size, lanes) * data.draw(st.integers(1, 40))
        if order.steps_remaining(row=row, global_batch=batch) == 0:
            break
        for rank in range(world_size):
            places = order.batch(epoch=case.epoch, row=row, global_batch=batch, rank=rank, world_size=world_size)
            for lane, at, padded, pair in zip(
                places.lane.tolist(), places.row.tolist(), places.padded.tolist(), pairs(places), strict=True
            ):
                assert pair == sequences[lane][at]
                assert padded or row <= at < row + batch // lanes
        row += batch // lanes


@thorough
@given(cases(), st.data())
def test_seeking_gives_what_walking_gives(case: Case, data):
    walked = list(walk_case(case))
    if not walked:
        return
    row, expected = data.draw(st.sampled_from(walked))
    rank = data.draw(st.integers(0, case.world_size - 1))
    place = {"epoch": case.epoch, "row": row, "global_batch": case.global_batch}

    assert_same(case.order.batch(**place, rank=rank, world_size=case.world_size), expected[rank])


@thorough
@given(cases(), st.data())
def test_an_order_used_for_other_places_before_answers_as_a_new_one(case: Case, data):
    used = case.order
    rows = used.rows_per_step(case.global_batch)
    for _ in range(8):
        world_size = data.draw(st.sampled_from([1, case.world_size]))
        steps = used.steps_remaining(row=0, global_batch=case.global_batch)
        if not steps:
            return
        place = {
            "epoch": data.draw(st.integers(0, 6)),
            "row": rows * data.draw(st.integers(0, steps - 1)),
            "global_batch": case.global_batch,
            "rank": data.draw(st.integers(0, world_size - 1)),
            "world_size": world_size,
        }
        assert_same(used.batch(**place), case.order.batch(**place))


@thorough
@given(cases(), st.data())
def test_samples_remaining_are_those_that_the_rank_goes_on_to_read(case: Case, data):
    order = case.order
    row = data.draw(st.integers(0, order.rows_per_epoch + 2))
    steps = list(walk_case(case, row=row))

    assert order.steps_remaining(row=row, global_batch=case.global_batch) == len(steps)
    for rank in range(case.world_size):
        remaining = order.rank_samples_remaining(
            row=row, global_batch=case.global_batch, rank=rank, world_size=case.world_size
        )
        assert remaining == sum(len(ranks[rank]) for _, ranks in steps)


@thorough
@given(cases(), st.lists(st.integers(1, 50), max_size=12))
def test_the_clock_never_falls_whatever_the_batch_sizes(case: Case, batches):
    order = case.order
    epoch = row = 0
    clocks = [order.clock(epoch=0, row=0)]
    for size in batches:
        if order.steps_remaining(row=row, global_batch=size * order.lanes) == 0:
            epoch, row = epoch + 1, 0
        else:
            row += size
        clocks.append(order.clock(epoch=epoch, row=row))

    assert clocks == sorted(clocks)


def test_a_data_set_smaller_than_its_lanes_gives_drop_no_step():
    order = order_of(2, 0, 1, lanes=5, tail="drop")

    assert order.steps_remaining(row=0, global_batch=5) == 0
    with pytest.raises(IndexError, match="no step of global batch 5 starts at row 0"):
        order.batch(epoch=0, row=0, global_batch=5, rank=0, world_size=1)


def test_a_data_set_smaller_than_its_lanes_gives_keep_each_sample_and_some_ranks_nothing():
    order = order_of(2, 0, 1, lanes=5, tail="keep")
    [(_, ranks)] = walk(order, epoch=0, global_batch=5, world_size=5)

    assert [len(batch) for batch in ranks] == [1, 1, 1, 0, 0]
    assert sorted(pair for batch in ranks for pair in pairs(batch)) == [(0, 0), (0, 1), (2, 0)]


def test_a_data_set_smaller_than_its_lanes_fills_the_empty_lanes_from_the_others_under_pad():
    order = order_of(2, 0, 1, lanes=5, tail="pad")
    [(_, ranks)] = walk(order, epoch=0, global_batch=5, world_size=5)

    assert [batch.padded.tolist() for batch in ranks] == [[False], [False], [False], [True], [True]]
    assert pairs(ranks[3]) == pairs(ranks[0])
    assert pairs(ranks[4]) == pairs(ranks[1])


@pytest.mark.parametrize("tail", ["drop", "pad", "keep"])
@pytest.mark.parametrize("sizes", [(), (0, 0)])
def test_a_data_set_without_samples_has_epochs_without_steps(tail, sizes):
    order = order_of(*sizes, lanes=2, tail=tail)

    assert (order.num_samples, order.rows_per_epoch) == (0, 0)
    assert order.steps_remaining(row=0, global_batch=2) == 0
    assert order.rank_samples_remaining(row=0, global_batch=2, rank=0, world_size=1) == 0
    assert len(order.accesses(epoch=0, from_row=0, global_batch=2, rank=0, world_size=1)) == 0


@pytest.mark.parametrize(
    ("global_batch", "world_size", "way_out"),
    [(100, 6, "pass 96 or 120"), (96, 5, "pass 80 or 120"), (4, 1, "pass 8 or a multiple of it"), (0, 1, "pass 8 or")],
)
def test_a_batch_that_lanes_or_ranks_do_not_divide_is_refused_with_sizes_that_work(global_batch, world_size, way_out):
    order = order_of(1000, lanes=8)

    with pytest.raises(ConfigError, match=way_out):
        order.batch(epoch=0, row=0, global_batch=global_batch, rank=0, world_size=world_size)


def test_rows_per_step_needs_the_lanes_to_divide_the_batch():
    order = order_of(1000, lanes=8)

    assert order.rows_per_step(24) == 3
    with pytest.raises(ConfigError, match=r"a global batch of 100 is no multiple of lanes=8.*pass 96 or 104"):
        order.rows_per_step(100)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ConfigError, match=f"rank={rank} is not in"):
        order_of(10).batch(epoch=0, row=0, global_batch=2, rank=rank, world_size=2)


def test_a_worker_outside_its_number_is_refused():
    with pytest.raises(ConfigError, match="worker=2 is not in"):
        order_of(10).worker_rows(row=0, global_batch=2, worker=2, num_workers=2)


def test_a_negative_sample_count_is_refused():
    with pytest.raises(ConfigError, match="shard 1 is said to hold -3 samples"):
        order_of(10, -3)


def test_what_is_remembered_between_calls_stays_little_through_many_epochs():
    order = order_of(*[20] * 50, lanes=2, redeal=0.5)
    for epoch in range(30):
        for rank in (0, 1):
            order.batch(epoch=epoch, row=0, global_batch=4, rank=rank, world_size=2)

    assert len(order._layouts) == len(order._cuts) == 4
