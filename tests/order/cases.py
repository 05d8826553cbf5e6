"""Data sets and options to try, and the walk through an epoch that most tests make."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder

if TYPE_CHECKING:
    from cacheloader.order.places import Places

# Empty shards, shards of one sample, shards below and above the size up to which a window is sorted.
shard_sizes = st.one_of(st.integers(0, 3), st.integers(0, 60), st.integers(400, 1500))
datasets = st.lists(shard_sizes, min_size=1, max_size=9).filter(any).map(lambda sizes: np.array(sizes, dtype=np.int64))
seeds = st.integers(0, 2**64 - 1)


def thorough(test):
    """Many examples, without a deadline for one: a busy machine, which takes minutes for them, is no wrong order."""
    tried = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    return pytest.mark.timeout(600)(tried(test))


@st.composite
def options(draw, *, tails=("drop", "pad", "keep"), shuffles=(True, True, True, False)):
    shuffle = draw(st.sampled_from(shuffles))
    return OrderOptions(
        seed=draw(seeds),
        lanes=draw(st.integers(1, 6)) if shuffle else 1,
        shuffle=shuffle,
        shuffle_window=draw(st.integers(1, 5)),
        tail=draw(st.sampled_from(tails)),
        redeal=draw(st.sampled_from((0, 0, 0.25, 1))) if shuffle else 0,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    samples_per_shard: np.ndarray
    options: OrderOptions
    epoch: int
    world_size: int
    global_batch: int

    @property
    def order(self) -> SampleOrder:
        return SampleOrder(self.samples_per_shard, self.options)

    @property
    def samples(self) -> list[tuple[int, int]]:
        return [(shard, i) for shard, count in enumerate(self.samples_per_shard.tolist()) for i in range(count)]


@st.composite
def cases(draw, **kwargs):
    chosen = draw(options(**kwargs))
    world_size = draw(st.integers(1, 6))
    samples = draw(datasets)
    unit = math.lcm(world_size, chosen.lanes)
    # From many steps in an epoch to a step that takes more than the epoch.
    batches = st.one_of(st.integers(1, 5), st.integers(1, 1 + int(samples.sum()) * 5 // 4 // unit))
    least = 1 + int(samples.sum()) // unit // 60
    return Case(
        samples_per_shard=samples,
        options=chosen,
        epoch=draw(st.integers(0, 9)),
        world_size=world_size,
        global_batch=unit * max(least, draw(batches)),
    )


def pairs(places: Places) -> list[tuple[int, int]]:
    return list(zip(places.shard.tolist(), places.sample.tolist(), strict=True))


def walk(order: SampleOrder, *, epoch: int, global_batch: int, world_size: int = 1, row: int = 0):
    """(row, the ranks' batches) of each step from ``row`` to the epoch's end."""
    rows = order.rows_per_step(global_batch)
    for step in range(order.steps_remaining(row=row, global_batch=global_batch)):
        at = row + step * rows
        yield (
            at,
            [
                order.batch(epoch=epoch, row=at, global_batch=global_batch, rank=rank, world_size=world_size)
                for rank in range(world_size)
            ],
        )


def walk_case(case: Case, *, row: int = 0):
    return walk(case.order, epoch=case.epoch, global_batch=case.global_batch, world_size=case.world_size, row=row)


def assert_same(one: Places, other: Places) -> None:
    for name in ("shard", "sample", "lane", "row", "padded"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
