"""What a position costs, at the start of a small data set and in the middle of a billion samples."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from benchmarks.contestants.position import PAYLOAD, SEED, key
from benchmarks.harness.contestant import Task
from benchmarks.harness.measurement import Tally
from benchmarks.harness.meter import sample_checksum
from benchmarks.harness.report import Comparison
from benchmarks.harness.runner import Entry
from benchmarks.scenarios.scenario import Prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

START = "start at row 0 of a billion"
MIDDLE = "resume in the middle of a billion"
FEW_SHARDS = 8
"""Enough for the 21 batches of a run that draws."""

STATE = "state, row 0 of 80,000 samples"
STATE_MIDDLE = "state, middle of a billion"
BARE = "no transform"
IDENTITY = "transform that returns its sample"
IDENTITY_RNG = "the same with an rng argument"
DRAWING = "transform with three draws"
LABELS = (START, MIDDLE, STATE, STATE_MIDDLE, BARE, IDENTITY, IDENTITY_RNG, DRAWING)

COMPARISONS = (
    Comparison(
        name="rate of first batches, middle / start",
        over=(MIDDLE, "first batch"),
        under=(START, "first batch"),
        target=1 / 1.2,
    ),
    Comparison(
        name="rate of states, middle of a billion / start of 80,000",
        over=(STATE_MIDDLE, "states"),
        under=(STATE, "states"),
    ),
    Comparison(name="identity / no transform", over=(IDENTITY, "transformed"), under=(BARE, "transformed")),
    Comparison(
        name="identity with rng / identity", over=(IDENTITY_RNG, "transformed"), under=(IDENTITY, "transformed")
    ),
)

NOTES = (
    "No shard exists: samples are made up when they are read, so what is timed is the order, the plan of the coming "
    "accesses of two epochs, the position, and what surrounds the transform. One lane, window of eight shards.",
    "first batch: from the constructor of RemoteDataset to the first batch, for a data set of 100,000 shards whose "
    "manifest is in memory; each run does it twenty times, with new objects.",
    "states: calls of state_dict() of a loader; samples/s counts states, so 20,000/s are 50 µs each. Bytes mean "
    "nothing.",
    "transformed: batches whose transform does nothing. What it costs more than no transform is the seeding of "
    "python's, numpy's and torch's generators for each sample, once a batch their saving, and the call.",
    "Each run ends with a comparison of the batch at its position with the order's own arithmetic.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionCost:
    """The scenario.

    Attributes:
        shards: Of the large data set.
        samples_per_shard: Of every data set.
        batch_size: Samples per batch.
    """

    theme: ClassVar[str] = "position"
    labels: ClassVar[Sequence[str]] = LABELS

    shards: int = 100_000
    samples_per_shard: int = 10_000
    batch_size: int = 2048

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:  # noqa: ARG002  (nothing is written)
        """Compute what the batches at both positions hold."""
        size = PositionCost(shards=1000, samples_per_shard=1000, batch_size=256) if small else self
        middle = size.shards * size.samples_per_shard // 2
        yield Prepared(
            entries=[
                size.entry(START, "FirstBatch", shards=size.shards, row=0),
                size.entry(MIDDLE, "FirstBatch", shards=size.shards, row=middle),
                size.entry(STATE, "States", shards=FEW_SHARDS, row=0),
                size.entry(STATE_MIDDLE, "States", shards=size.shards, row=middle),
                *(
                    size.entry(label, "Draws", shards=FEW_SHARDS, row=0, transform=transform)
                    for label, transform in (
                        (BARE, "none"),
                        (IDENTITY, "identity"),
                        (IDENTITY_RNG, "identity with rng"),
                        (DRAWING, "draws"),
                    )
                ),
            ],
            comparisons=COMPARISONS,
            parameters={
                "shards": size.shards,
                "samples_per_shard": size.samples_per_shard,
                "batch_size": size.batch_size,
            },
            notes=NOTES,
        )

    def entry(self, label: str, contestant: str, *, shards: int, row: int, **options: object) -> Entry:
        """A contestant that stands at ``row``."""
        return Entry(
            label=label,
            factory=f"benchmarks.contestants.position:{contestant}",
            options={"shards": shards, "samples_per_shard": self.samples_per_shard, "row": row, **options},
            task=Task(
                folder="",
                source_folder="",
                reads="",
                shard_names=[],
                shard_bytes=[],
                store=None,
                expected=self._batch_at(shards=shards, row=row),
                batch_size=self.batch_size,
                num_workers=0,
                warm_epochs=0,
            ),
        )

    def _batch_at(self, *, shards: int, row: int) -> Tally:
        from cacheloader.order.options import OrderOptions
        from cacheloader.order.sample_order import SampleOrder

        order = SampleOrder(np.full(shards, self.samples_per_shard), OrderOptions(seed=SEED))
        places = order.batch(epoch=0, row=row, global_batch=self.batch_size, rank=0, world_size=1)
        keys = [key(*at) for at in zip(places.shard.tolist(), places.sample.tolist(), strict=True)]
        checksum = sum(sample_checksum(name, PAYLOAD) for name in keys) % 2**64
        return Tally(samples=len(keys), size_bytes=len(keys) * len(PAYLOAD), checksum=checksum)


SCENARIO = PositionCost()
