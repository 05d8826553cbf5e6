"""Random lives of a job: a data set, an order, and legs on changing numbers of ranks, each from one cut to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Literal

Loop = Literal["ours", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """What happens between two cuts.

    Attributes:
        world_size: Ranks.
        num_workers: Of each rank.
        batch_size: Of each rank.
        steps: How many are taken before the cut, over edges of epochs.
        loop: Whose loader is used.
    """

    world_size: int
    num_workers: int
    batch_size: int
    steps: int
    loop: Loop

    @property
    def global_batch(self) -> int:
        return self.world_size * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job.

    Attributes:
        seed: Names the case.
        samples_per_shard: The data set.
        lanes: Order.
        shuffle: Order.
        shuffle_window: Order.
        redeal: Order.
        tail: Order.
        leaves_out: Whether the transform skips some samples and fails on others.
        legs: The lives.
    """

    seed: int
    samples_per_shard: tuple[int, ...]
    lanes: int
    shuffle: bool
    shuffle_window: int
    redeal: float
    tail: str
    leaves_out: bool
    legs: tuple[Leg, ...]

    @property
    def num_samples(self) -> int:
        return sum(self.samples_per_shard)


def case(seed: int, *, max_world_size: int = 16, max_workers: int = 0) -> Case:
    """The case of this number: the same in every run."""
    random = Random(seed)
    shuffle = random.random() < 0.9
    lanes = random.choice([1, 1, 2, 3, 4, 5, 6, 8, 12, 16]) if shuffle else 1
    tail = random.choice(["drop", "pad", "keep"])
    samples_per_shard = [random.choice([0, 1, random.randint(1, 6), random.randint(4, 16)]) for _ in range(6)]
    samples_per_shard[random.randrange(6)] += lanes  # at least one full row
    leaves_out = random.random() < 0.3
    legs = []
    for _ in range(random.randint(2, 5)):
        world_size, global_batch = _shared_batch(
            random, lanes=lanes, full_rows=sum(samples_per_shard) // lanes, tail=tail, max_world_size=max_world_size
        )
        steps_per_epoch = max(1, sum(samples_per_shard) // global_batch)
        legs.append(
            Leg(
                world_size=world_size,
                num_workers=random.randint(0, max_workers),
                batch_size=global_batch // world_size,
                steps=random.choice([0, 1, random.randint(1, steps_per_epoch), random.randint(1, 2 * steps_per_epoch)]),
                loop="ours" if leaves_out else random.choice(["ours", "torch"]),
            )
        )
    return Case(
        seed=seed,
        samples_per_shard=tuple(samples_per_shard),
        lanes=lanes,
        shuffle=shuffle,
        shuffle_window=random.randint(1, 4),
        redeal=random.choice([0.0, 0.0, 0.5, 1.0]) if shuffle else 0.0,
        tail=tail,
        leaves_out=leaves_out,
        legs=tuple(legs),
    )


def _shared_batch(random: Random, *, lanes: int, full_rows: int, tail: str, max_world_size: int) -> tuple[int, int]:
    """A world size and a global batch that lanes and ranks can share; it fits the epoch where the rest is dropped."""
    for _ in range(20):
        world_size = random.randint(1, max_world_size)
        global_batch = math.lcm(lanes, world_size) * random.choice([1, 1, 2, 3])
        if global_batch <= 96 and (tail != "drop" or global_batch // lanes <= full_rows):
            return world_size, global_batch
    return 1, lanes
