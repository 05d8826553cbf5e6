"""Mixtures to try, and the mixture told place by place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from cacheloader.order.mixture_order import MixtureOrder
from cacheloader.order.mixture_pattern import BlockPattern
from cacheloader.order.mixture_schedule import WeightsFrom, phases_of
from cacheloader.order.mixture_shares import BLOCK_ROWS, Shares
from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder

from .cases import seeds

weights = st.one_of(st.integers(1, 9), st.floats(0.05, 1), st.sampled_from((0.1, 0.3, 1 / 3, 0.7)))


@st.composite
def weightings(draw, num_sources: int, *, may_pause: bool = True):
    values = draw(st.lists(weights, min_size=num_sources, max_size=num_sources))
    if may_pause and num_sources > 1 and draw(st.booleans()):
        values[draw(st.integers(0, num_sources - 1))] = 0
    return dict(zip("abcdefgh"[:num_sources], values, strict=True))


@dataclass(frozen=True, kw_only=True)
class Mix:
    names: str
    weights: dict[str, float]
    schedule: tuple[WeightsFrom, ...]
    seed: int
    lanes: int
    epoch_rows: int
    tail: str
    samples_per_shard: tuple[np.ndarray, ...]
    options: tuple[OrderOptions, ...]

    @property
    def shares(self) -> Shares:
        return Shares(phases_of(self.weights, self.schedule, names=self.names, lanes=self.lanes))

    @property
    def order(self) -> MixtureOrder:
        return MixtureOrder(self.shares, seed=self.seed, lanes=self.lanes, epoch_rows=self.epoch_rows, tail=self.tail)

    @property
    def sources(self) -> list[SampleOrder]:
        return [SampleOrder(s, o) for s, o in zip(self.samples_per_shard, self.options, strict=True)]


@st.composite
def mixes(draw, *, most_lanes: int = 4, tails=("carry", "keep"), unshuffled=True):
    num_sources = draw(st.integers(1, 4))
    lanes = draw(st.integers(1, most_lanes))
    schedule = []
    for row in draw(st.lists(st.integers(1, 4 * BLOCK_ROWS), max_size=2, unique_by=lambda row: -(-row // BLOCK_ROWS))):
        schedule.append(WeightsFrom(rows=row, weights=draw(weightings(num_sources))))
    sizes, options = [], []
    for _ in range(num_sources):
        samples = draw(
            st.lists(st.one_of(st.integers(0, 40), st.integers(200, 3000)), min_size=1, max_size=6).filter(
                lambda sizes: sum(sizes) >= lanes
            )
        )
        sizes.append(np.array(samples, dtype=np.int64))
        shuffle = not (unshuffled and lanes == 1 and draw(st.booleans()))
        options.append(
            OrderOptions(
                seed=draw(seeds),
                lanes=lanes,
                shuffle=shuffle,
                shuffle_window=draw(st.integers(1, 4)),
                redeal=draw(st.sampled_from((0, 0, 0.5))) if shuffle else 0,
            )
        )
    return Mix(
        names="abcdefgh"[:num_sources],
        weights=draw(weightings(num_sources)),
        schedule=tuple(schedule),
        seed=draw(seeds),
        lanes=lanes,
        epoch_rows=draw(st.one_of(st.integers(1, 50), st.integers(3000, 9000))),
        tail=draw(st.sampled_from(tails)),
        samples_per_shard=tuple(sizes),
        options=tuple(options),
    )


def told(mix: Mix, *, lane: int, num_rows: int) -> list[tuple[int, int]]:
    """(source, turn) of the first rows of a lane, counted one by one."""
    shares = mix.shares
    seen = [0] * len(mix.names)
    places = []
    for block in range(-(-num_rows // BLOCK_ROWS)):
        counts = np.subtract(shares.before(block + 1), shares.before(block))
        for source in BlockPattern.of(counts, seed=mix.seed, lane=lane, block=block).source.tolist():
            places.append((source, seen[source]))
            seen[source] += 1
    return places[:num_rows]


def order_of(*, lanes=2, epoch_rows=5000, tail="carry", schedule=(), **weights) -> MixtureOrder:
    phases = phases_of(weights, schedule, names=sorted(weights), lanes=lanes)
    return MixtureOrder(Shares(phases), seed=7, lanes=lanes, epoch_rows=epoch_rows, tail=tail)
