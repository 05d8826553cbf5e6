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
FLOOR = "batches in memory, through a queue (floor)"
RIVALS = (rivals.WEBDATASET, rivals.STREAMING, rivals.LITDATA)
LABELS = (FLOOR, PRODUCT, PRODUCT_2, *(rival.named(2) for rival in RIVALS))

AFTER_FIRST = "waiting share after the first batch"
_SHARE, _P99 = "waiting share", "fetch p99 ms"


def _waiting(name: str, label: str, phase: str, figure: str, target: float | None = None, goal: str = "") -> Comparison:
    return Comparison(
        name=f"{phase}, {name}", over=(label, phase), under=None, figure=figure, target=target, at_most=True, goal=goal
    )


COMPARISONS = (
    *(
        comparison
        for name, label, p99_goal in (("2 workers", PRODUCT_2, "fetch-p99"), ("0 workers", PRODUCT, ""))
        for comparison in (
            _waiting(name, label, "cold", AFTER_FIRST, 0.01, "stall-cold"),
            _waiting(name, label, "warm", _SHARE, 0.001, "stall-warm"),
            _waiting(name, label, "warm", _P99, 1.0, p99_goal),
            Comparison(name=f"warm, {name} / floor", over=(label, "warm"), under=(FLOOR, "warm"), figure=_SHARE),
        )
    ),
    *(
        _waiting(label, label, phase, figure)
        for label in (FLOOR, *(rival.named(2) for rival in RIVALS))
        for phase, figure in (("cold", AFTER_FIRST), ("warm", _SHARE), ("warm", _P99))
        if (label, phase) != (FLOOR, "cold")
    ),
)

NOTES = (
    "The training thread sleeps in each step, as it does while it waits for a device; the step is longer than the "
    "time in which this machine can bring a batch from the store.",
    "Waiting share: time inside next(), each epoch's start and end included, as a part of the wall time. After the "
    "first batch: without the time until then, which a long epoch makes as small as one likes; it stands in the table.",
    "floor: a python thread hands batches that lie in memory as a whole to the training thread through a queue.Queue; "
    "what it waits is what it costs to be woken from a step, with nothing in the processor's caches.",
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
                    label=FLOOR,
                    factory="benchmarks.contestants.paced:Paced",
                    options={"loader": "benchmarks.contestants.from_memory:FromMemory", "step_s": size.step_s},
                    task=there.task(0),
                )
            ]
            entries += [
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
