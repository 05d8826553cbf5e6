from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder

from .cases import Case, cases, thorough, walk_case
from .model import lane_windows


def triples(accesses) -> list[tuple[int, int, int]]:
    return list(zip(accesses.shard.tolist(), accesses.first_row.tolist(), accesses.stop_row.tolist(), strict=True))


def accesses_of(case: Case, *, rank: int, from_row: int = 0):
    return case.order.accesses(
        epoch=case.epoch,
        from_row=from_row,
        global_batch=case.global_batch,
        rank=rank,
        world_size=case.world_size,
    )


@thorough
@given(cases(), st.data())
def test_every_reading_lies_in_an_access_of_its_shard(case: Case, data):
    row = data.draw(st.integers(0, case.order.rows_per_epoch))
    steps = list(walk_case(case, row=row))
    for rank in range(case.world_size):
        accesses = accesses_of(case, rank=rank, from_row=row)
        needed: dict[int, set[int]] = {}
        for shard, first, stop in triples(accesses):
            needed.setdefault(shard, set()).update(range(first, stop))
        for at, ranks in steps:
            batch = ranks[rank]
            for shard, lane_row, padded in zip(
                batch.shard.tolist(), batch.row.tolist(), batch.padded.tolist(), strict=True
            ):
                rows = range(at, case.order.rows_per_epoch) if padded else [lane_row]
                assert needed.get(shard, set()).issuperset(rows)


@thorough
@given(cases(), st.data())
def test_accesses_are_the_windows_that_the_rank_reads_cut_to_the_rows_it_reads_and_no_others(case: Case, data):
    row = data.draw(st.integers(0, case.order.rows_per_epoch))
    lanes = lane_windows(case.samples_per_shard, case.options, case.epoch)
    steps = list(walk_case(case, row=row))
    for rank in range(case.world_size):
        expected = []
        read = {
            (lane, lane_row)
            for _, ranks in steps
            for lane, lane_row in zip(
                ranks[rank].lane[~ranks[rank].padded].tolist(),
                ranks[rank].row[~ranks[rank].padded].tolist(),
                strict=True,
            )
        }
        for lane, windows in enumerate(lanes):
            start = 0
            for window in windows:
                own = [at for at in range(start, start + len(window)) if (lane, at) in read]
                if own:
                    expected += [(shard, own[0], own[-1] + 1) for shard in {shard for shard, _ in window}]
                start += len(window)
        for at, ranks in steps:
            added = set(ranks[rank].shard[ranks[rank].padded].tolist())
            expected += [(shard, at, case.order.rows_per_epoch) for shard in added]
        assert sorted(triples(accesses_of(case, rank=rank, from_row=row))) == sorted(expected)


@thorough
@given(cases())
def test_accesses_come_in_the_order_of_their_first_row(case: Case):
    accesses = accesses_of(case, rank=0)

    assert (np.diff(accesses.first_row) >= 0).all()
    assert (accesses.first_row < accesses.stop_row).all()
    assert (accesses.stop_row <= case.order.rows_per_epoch).all()
    assert accesses.shard.dtype == np.int32
    assert accesses.first_row.dtype == accesses.stop_row.dtype == np.int64


def test_no_access_touches_more_shards_at_once_than_the_window():
    order = SampleOrder(np.full(40, 50), OrderOptions(seed=1, lanes=4, shuffle_window=3))
    accesses = order.accesses(epoch=0, from_row=0, global_batch=8, rank=1, world_size=4)

    held = [np.sum((accesses.first_row <= row) & (row < accesses.stop_row)) for row in range(500)]
    assert max(held) == 3
    assert held[0] == 1


def test_accesses_of_a_rank_are_its_own_lanes_shards_in_every_epoch():
    order = SampleOrder(np.full(40, 50), OrderOptions(seed=1, lanes=4))
    shards = [
        [
            set(order.accesses(epoch=epoch, from_row=0, global_batch=8, rank=rank, world_size=4).shard.tolist())
            for rank in range(4)
        ]
        for epoch in range(3)
    ]

    assert shards[0] == shards[1] == shards[2]
    assert set.union(*shards[0]) == set(range(40))
    assert sum(map(len, shards[0])) == 40
