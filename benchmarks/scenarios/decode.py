"""JPEGs with a transform that decodes them: what is left of a loader's speed when the work is real."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from benchmarks.harness.packing import pack_pictures
from benchmarks.harness.report import Comparison
from benchmarks.harness.runner import Entry
from benchmarks.scenarios import rivals
from benchmarks.scenarios.ground import ground

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.scenarios.scenario import Prepared

BARE_2 = "pread and decode, 2 processes (ceiling)"
PRODUCT_2 = "cacheloader, 2 workers"
RIVALS = tuple(
    replace(rival, options={**rival.options, "decode": True})
    for rival in (rivals.WEBDATASET, rivals.STREAMING, rivals.LITDATA)
)
LABELS = (BARE_2, PRODUCT_2, *(rival.named(2) for rival in RIVALS))

COMPARISONS = (
    Comparison(name="warm / bare decode", over=(PRODUCT_2, "warm"), under=(BARE_2, "warm"), target=0.97, goal="decode"),
    *(
        Comparison(name=f"{phase} / {rival.label}", over=(PRODUCT_2, phase), under=(rival.named(2), phase))
        for rival in RIVALS
        for phase in ("cold", "warm")
    ),
    *(
        Comparison(
            name=f"RSS of a worker / {rival.label}",
            over=(PRODUCT_2, "warm"),
            under=(rival.named(2), "warm"),
            figure="RSS worker MB",
            target=1,
            at_most=True,
            goal="rss-worker",
        )
        for rival in RIVALS
    ),
)

NOTES = (
    "The transform decodes a JPEG of 500 × 375 pixels by pillow and scales it to 224 × 224, uint8. Every contestant "
    "has the same function, at the place where its documentation puts a transform.",
    "The ceiling reads and decodes in two processes and hands the pixels to nobody; with two workers on two cores, "
    "decoding is more than nine tenths of all CPU time, so nobody can be faster. What it frees stays in its process: "
    "with the C library's defaults some of its runs take 475 page faults a sample and others 3, by the layout of the "
    "heap, and are a fifth slower. It goes through all warm epochs without a stop, whereas a loader's workers wait for "
    "one another between two epochs.",
    "Payload bytes are those of the pixels.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """The scenario.

    Attributes:
        samples: Size of the data set.
        shards: Number of tar files.
        warm_epochs: Epochs in the warm phase.
    """

    theme: ClassVar[str] = "decode"
    labels: ClassVar[Sequence[str]] = LABELS

    samples: int = 1024
    shards: int = 8
    warm_epochs: int = 3

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:
        """Pack, start the store, upload."""
        from benchmarks.peers.decoding import SIDE, decode

        size = replace(self, samples=256, shards=4, warm_epochs=1) if small else self
        packed = pack_pictures(
            folder / "packed",
            samples=size.samples,
            shards=size.shards,
            delivered=lambda payload: decode(payload).tobytes(),
        )
        with ground(folder, packed, warm_epochs=size.warm_epochs) as there:
            task = replace(there.task(2), has_disk_epoch=False)  # its time is better spent on a third warm epoch
            entries = [
                Entry(label=BARE_2, factory="benchmarks.contestants.bare_decode:BareDecode", task=task),
                Entry(
                    label=PRODUCT_2,
                    factory="benchmarks.contestants.epochs:Epochs",
                    options={
                        "loader": "benchmarks.contestants.cacheloader:CacheloaderLoader",
                        "options": {"decode": True},
                    },
                    task=task,
                ),
            ]
            for rival in RIVALS:
                entries += there.rival_entries(rival, (2,), script="epochs:Epochs")
            yield there.prepared(
                entries,
                comparisons=COMPARISONS,
                rivals=RIVALS,
                notes=NOTES,
                sizes={
                    **asdict(size),
                    "jpeg_bytes": packed.size_bytes // size.samples,
                    "pixels": f"{SIDE} x {SIDE}",
                },
            )


SCENARIO = Decode()
