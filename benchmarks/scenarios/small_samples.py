"""Samples of a kilobyte, read warm by one process: what a sample costs when its bytes cost nothing."""

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

PREAD = "pread, 1 process (ceiling)"
PRODUCT = "cacheloader, 0 workers"
RIVALS = (rivals.WEBDATASET, rivals.STREAMING, rivals.LITDATA)
LABELS = (PREAD, PRODUCT, *(rival.named(0) for rival in RIVALS))

COMPARISONS = (
    Comparison(name="warm samples/s", over=(PRODUCT, "warm"), under=None, target=100_000, goal="small-samples"),
    Comparison(name="warm / pread, a call a sample", over=(PRODUCT, "warm"), under=(PREAD, "warm")),
    *(
        Comparison(name=f"warm / {rival.label}", over=(PRODUCT, "warm"), under=(rival.named(0), "warm"), target=10)
        for rival in RIVALS
    ),
)

NOTES = (
    "One process, no workers, no transform. pread reads each sample by a call of its own, into memory that it reuses, "
    "in the product's order; the product may read neighbours together.",
    "The samples per second of a shared machine say little; the ratios within a round say more.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallSamples:
    """The scenario.

    Attributes:
        samples: Size of the data set.
        sample_bytes: Payload of one sample.
        shards: Number of tar files.
        warm_epochs: Epochs in the warm phase of the peers; pread and the product have eight times as many.
    """

    theme: ClassVar[str] = "small-samples"
    labels: ClassVar[Sequence[str]] = LABELS

    samples: int = 24_576
    sample_bytes: int = 1_000
    shards: int = 8
    warm_epochs: int = 2

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:
        """Pack, start the store, upload."""
        size = replace(self, samples=2048, shards=4, warm_epochs=1) if small else self
        packed = pack(folder / "packed", samples=size.samples, sample_bytes=size.sample_bytes, shards=size.shards)
        with ground(folder, packed, warm_epochs=size.warm_epochs) as there:
            # Theirs would be over in a blink.
            task = replace(there.task(0), warm_epochs=8 * size.warm_epochs)
            entries = [
                Entry(label=PREAD, factory="benchmarks.contestants.pread:Pread", task=task),
                Entry(
                    label=PRODUCT,
                    factory="benchmarks.contestants.epochs:Epochs",
                    options={"loader": "benchmarks.contestants.cacheloader:CacheloaderLoader"},
                    task=task,
                ),
            ]
            for rival in RIVALS:
                entries += there.rival_entries(rival, (0,), script="epochs:Epochs")
            yield there.prepared(entries, comparisons=COMPARISONS, rivals=RIVALS, notes=NOTES, sizes=asdict(size))


SCENARIO = SmallSamples()
