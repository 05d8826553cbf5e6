"""A training step that takes longer than its data: how much of the loader still shows."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from benchmarks.harness.packing import pack
from benchmarks.harness.report import Comparison
from benchmarks.harness.runner import Entry
from benchmarks.scenarios import rivals
from benchmarks.scenarios.ground import ground

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.scenarios.scenario import Prepared

PRODUCT = "cacheloader, 0 workers"
PRODUCT_2 = "cacheloader, 2 workers"
RIVALS = (rivals.WEBDATASET, rivals.STREAMING, rivals.LITDATA)
LABELS = (PRODUCT, PRODUCT_2, *(rival.named(2) for rival in RIVALS))

AFTER_FIRST = "waiting share after the first batch"
COMPARISONS = tuple(
    Comparison(name=name, over=(label, phase), under=None, figure=figure, target=target, at_most=True, goal=goal)
    for name, label in (("2 workers", PRODUCT_2), ("0 workers", PRODUCT))
    for name, phase, figure, target, goal in (
        (f"cold, {name}", "cold", AFTER_FIRST, 0.01, "stall-cold"),
        (f"warm, {name}", "warm", "waiting share", 0.001, "stall-warm"),
        (f"warm, {name}", "warm", "fetch p99 ms", 1.0, "fetch-p99" if label == PRODUCT_2 else ""),
    )
) + tuple(
    Comparison(name=f"{phase}, {rival.named(2)}", over=(rival.named(2), phase), under=None, figure=figure)
    for rival in RIVALS
    for phase, figure in (("cold", AFTER_FIRST), ("warm", "waiting share"), ("warm", "fetch p99 ms"))
)

NOTES = (
    "The training thread sleeps in each step, as it does while it waits for a device; the step is longer than the "
    "time in which this machine can bring a batch from the store.",
    "Waiting share: time inside next(), each epoch's start and end included, as a part of the wall time. After the "
    "first batch: without the time until then, which a long epoch makes as small as one likes; it stands in the table.",
    "warm: the epochs after the first in the same process; workers stay alive. They have 200 batches together: the "
    "99th percentile is the third longest wait, so that it is not one of the two at which an epoch begins.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The scenario.

    Attributes:
        samples: Size of the data set.
        sample_bytes: Payload of one sample.
        shards: Number of tar files.
        step_s: Time of a step.
        warm_epochs: Epochs in the warm phase.
    """

    theme: ClassVar[str] = "stall"
    labels: ClassVar[Sequence[str]] = LABELS

    samples: int = 6400
    sample_bytes: int = 60_000
    shards: int = 8
    step_s: float = 0.04
    warm_epochs: int = 2

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:
        """Pack, start the store, upload."""
        size = replace(self, samples=512, sample_bytes=10_000, shards=4, warm_epochs=1) if small else self
        packed = pack(folder / "packed", samples=size.samples, sample_bytes=size.sample_bytes, shards=size.shards)
        with ground(folder, packed, warm_epochs=size.warm_epochs) as there:
            entries = [
                Entry(
                    label=label,
                    factory="benchmarks.contestants.paced:Paced",
                    options={
                        "loader": "benchmarks.contestants.cacheloader:CacheloaderLoader",
                        "step_s": size.step_s,
                    },
                    task=there.task(workers),
                )
                for label, workers in ((PRODUCT, 0), (PRODUCT_2, 2))
            ]
            for rival in RIVALS:
                entries += [
                    replace(entry, options={**entry.options, "step_s": size.step_s})
                    for entry in there.rival_entries(rival, (2,), script="paced:Paced")
                ]
            yield there.prepared(entries, comparisons=COMPARISONS, rivals=RIVALS, notes=NOTES, sizes=asdict(size))


SCENARIO = Stall()
