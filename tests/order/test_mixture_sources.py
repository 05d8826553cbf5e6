from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ConfigError
from cacheloader.order.mixture_sources import MixtureSources
from cacheloader.order.options import OrderOptions

from .cases import thorough
from .mixture_cases import Mix, mixes, order_of, told


def sources_of(mix: Mix) -> MixtureSources:
    return MixtureSources(
        mix.order,
        samples_per_shard=dict(zip(mix.names, mix.samples_per_shard, strict=True)),
        options=dict(zip(mix.names, mix.options, strict=True)),
    )


def step(sources: MixtureSources, *, world_size: int, **where: int) -> list[tuple[int, int, int, int, int]]:
    """(lane, row, source, shard, sample) of one step of all ranks, rank behind rank."""
    taken = []
    for rank in range(world_size):
        batch = sources.batch(rank=rank, world_size=world_size, **where)
        found = {}
        for own in batch.by_source:
            for place, shard, sample in zip(own.place.tolist(), own.shard.tolist(), own.sample.tolist(), strict=True):
                assert batch.source[place] == own.source
                found[place] = (shard, sample)
        assert sorted(found) == list(range(len(batch.row)))
        taken += [
            (lane, row, source, *found[place])
            for place, (lane, row, source) in enumerate(
                zip(batch.lane.tolist(), batch.row.tolist(), batch.source.tolist(), strict=True)
            )
        ]
    return taken


@thorough
@given(mixes(), st.data())
def test_any_world_and_batch_that_goes_on_at_a_position_reads_what_one_process_would(mix: Mix, data):
    """Cut at a step, go on elsewhere with other ranks and batches, again and again: the rows of each lane run on."""
    order = mix.order
    epoch = row = 0
    read: dict[int, list[tuple[int, int, int, int]]] = {lane: [] for lane in range(mix.lanes)}
    for _ in range(data.draw(st.integers(1, 6))):
        world_size = data.draw(st.integers(1, 5))
        batch = math.lcm(world_size, mix.lanes) * data.draw(st.integers(1, 200))
        if not order.steps_remaining(row=row, global_batch=batch):
            epoch, row = order.next_epoch(epoch=epoch, row=row, global_batch=batch)
        for lane, *rest in step(sources_of(mix), epoch=epoch, row=row, global_batch=batch, world_size=world_size):
            read[lane].append(tuple(rest))
        row += order.rows_per_step(batch)
    rows = len(read[0])
    alone = {lane: [] for lane in range(mix.lanes)}
    for lane, *rest in _all_rows(mix, rows):
        alone[lane].append(tuple(rest))
    assert read == {lane: sorted(places) for lane, places in alone.items()}


def _all_rows(mix: Mix, rows: int):
    """Each lane told place by place, then its samples looked up in the orders of the sources, epoch by epoch."""
    for lane in range(mix.lanes):
        places = np.array(told(mix, lane=lane, num_rows=rows))
        for source, own in enumerate(mix.sources):
            at = np.flatnonzero(places[:, 0] == source)
            epochs, own_rows = np.divmod(places[at, 1], int(own.lane_lengths(lane, lane + 1)[0]))
            for epoch in np.unique(epochs).tolist():
                row = own_rows[epochs == epoch]
                shard, sample = own.locate(
                    epoch=epoch, lane=np.full(len(row), lane), row=row, first_lane=0, stop_lane=mix.lanes
                )
                for when, *found in zip(at[epochs == epoch].tolist(), shard.tolist(), sample.tolist(), strict=True):
                    yield lane, when, source, *found


@thorough
@given(mixes(), st.integers(1, 3), st.integers(1, 50), st.data())
def test_what_a_rank_reads_in_this_epoch_and_the_next_lies_in_its_accesses(mix: Mix, world_size, factor, data):
    sources, order = sources_of(mix), mix.order
    batch = math.lcm(world_size, mix.lanes) * factor
    rank = data.draw(st.integers(0, world_size - 1))
    share = {"global_batch": batch, "rank": rank, "world_size": world_size}
    start = data.draw(st.integers(0, order.rows_per_epoch - 1))
    needed = []
    for accesses in sources.accesses(epoch=1, from_row=start, **share):
        own: dict[int, list[tuple[int, int]]] = {}
        for shard, first, stop in zip(
            accesses.shard.tolist(), accesses.first_row.tolist(), accesses.stop_row.tolist(), strict=True
        ):
            own.setdefault(shard, []).append((first, stop))
        needed.append(own)
    epoch, row = 1, start
    steps = 0
    while epoch <= 2 and steps < 30:
        for _ in range(min(15, order.steps_remaining(row=row, global_batch=batch))):
            read = sources.batch(epoch=epoch, row=row, **share)
            for own in read.by_source:
                for shard, at in zip(own.shard.tolist(), read.row[own.place].tolist(), strict=True):
                    assert any(first <= at < stop for first, stop in needed[own.source][shard])
            row += order.rows_per_step(batch)
            steps += 1
        epoch, row = order.next_epoch(epoch=epoch, row=row, global_batch=batch)


def test_a_source_with_fewer_samples_than_lanes_is_refused():
    with pytest.raises(ConfigError, match="source 'a' holds 2 samples and the mixture has 3 lanes"):
        MixtureSources(
            order_of(lanes=3, a=1),
            samples_per_shard={"a": np.array([1, 1])},
            options={"a": OrderOptions()},
        )


def test_a_source_in_data_set_order_needs_a_mixture_of_one_lane():
    with pytest.raises(ConfigError, match="shuffle=False reads one lane"):
        MixtureSources(
            order_of(lanes=2, a=1), samples_per_shard={"a": np.array([9])}, options={"a": OrderOptions(shuffle=False)}
        )
