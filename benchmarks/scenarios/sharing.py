"""Two ranks with eight workers each on one node: how often does a byte cross the network?"""

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

RANKS, WORKERS = 2, 8
PRODUCT = f"cacheloader, {RANKS} ranks of {WORKERS} workers"
RIVALS = (rivals.WEBDATASET, rivals.STREAMING, rivals.LITDATA, rivals.ENERGON, rivals.HF_DATASETS)


def _label(rival: rivals.Rival) -> str:
    return f"{rival.label}, {RANKS} ranks of {WORKERS} workers"


LABELS = (PRODUCT, *map(_label, RIVALS))

BYTES = "origin bytes / data set"
COMPARISONS = (
    Comparison(
        name="cold, bytes from the store",
        over=(PRODUCT, "cold"),
        under=None,
        figure=BYTES,
        target=1.005,
        at_most=True,
        goal="sharing",
    ),
    Comparison(
        name="warm, bytes from the store", over=(PRODUCT, "warm"), under=None, figure=BYTES, target=0, at_most=True
    ),
    *(
        Comparison(
            name=f"cold, bytes from the store, {rival.label}", over=(_label(rival), "cold"), under=None, figure=BYTES
        )
        for rival in RIVALS
    ),
    *(
        Comparison(name=f"{phase} / {rival.label}", over=(PRODUCT, phase), under=(_label(rival), phase))
        for rival in RIVALS
        for phase in ("cold", "warm")
    ),
)

NOTES = (
    "All ranks read one epoch together, each its own part: an untimed pass compares what they delivered together with "
    "what was packed. They find their rank as under torchrun, in the environment and in torch.distributed (gloo).",
    "Bytes from the store are the store's own count of object bodies, divided by the length of all objects that the "
    "data set has there in the contestant's format, its index included: 1.00 is the data set once.",
    "Samples are read raw. The workers share two cores with everything else: the rates say little, the bytes do.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The scenario.

    Attributes:
        samples: Size of the data set.
        sample_bytes: Payload of one sample.
        shards: Number of tar files: two for each worker of a rank.
    """

    theme: ClassVar[str] = "sharing"
    labels: ClassVar[Sequence[str]] = LABELS

    samples: int = 4096
    sample_bytes: int = 50_000
    shards: int = 32

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:
        """Pack, start the store, upload."""
        size = replace(self, samples=2048, sample_bytes=2_000) if small else self
        packed = pack(folder / "packed", samples=size.samples, sample_bytes=size.sample_bytes, shards=size.shards)
        with ground(folder, packed, warm_epochs=1) as there:
            options = {"loader": "benchmarks.contestants.cacheloader:CacheloaderLoader", "ranks": RANKS}
            task = there.task(WORKERS)
            entries = [Entry(label=PRODUCT, factory="benchmarks.contestants.ranks:Ranks", options=options, task=task)]
            for rival in RIVALS:
                entries += [
                    replace(entry, label=_label(rival), options={**entry.options, "ranks": RANKS})
                    for entry in there.rival_entries(rival, (WORKERS,), script="ranks:Ranks")
                ]
            yield there.prepared(entries, comparisons=COMPARISONS, rivals=RIVALS, notes=NOTES, sizes=asdict(size))


SCENARIO = Sharing()
