"""Two epochs of raw bytes from an S3 server on the same machine: one from the store, the others from the cache."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.contestants.cacheloader import reads_of_epoch
from benchmarks.harness.packing import pack
from benchmarks.harness.report import Comparison
from benchmarks.harness.runner import Entry
from benchmarks.scenarios import rivals
from benchmarks.scenarios.ground import BATCH_SIZE, ground

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.harness.contestant import Task
    from benchmarks.scenarios.scenario import Prepared

ENGINE = "engine (ceiling)"
FIRST_WINDOW = "engine, first window first"
PREAD = "pread, 1 process (ceiling)"
PREAD_2 = "pread, 2 processes (ceiling)"
PREAD_BATCH = "pread holding a batch, 1 process"
PREAD_BATCH_2 = "pread holding a batch, 2 processes"
PRODUCT = "cacheloader, 0 workers"
PRODUCT_2 = "cacheloader, 2 workers"
PRODUCT_UNCOUNTED = "cacheloader, 2 workers, no shards.json"
RIVALS_ALONE = (rivals.WEBDATASET, rivals.STREAMING, rivals.LITDATA)
RIVALS_SHARED = (*rivals.CACHING, *rivals.STREAMERS)
WEBDATASET = rivals.WEBDATASET.named(0)
WEBDATASET_2 = rivals.WEBDATASET.named(2)
WEBDATASET_STREAM = rivals.WEBDATASET_STREAM.named(2)
LABELS = (
    ENGINE,
    FIRST_WINDOW,
    PREAD,
    PREAD_2,
    PREAD_BATCH,
    PREAD_BATCH_2,
    PRODUCT,
    PRODUCT_2,
    PRODUCT_UNCOUNTED,
    *(rival.named(0) for rival in RIVALS_ALONE),
    *(rival.named(2) for rival in RIVALS_SHARED),
)

COLD_TARGET = 0.85
WARM_TARGET = 0.8

COMPARISONS = (
    Comparison(
        name="cold, 2 workers / engine",
        over=(PRODUCT_2, "cold"),
        under=(ENGINE, "cold"),
        target=COLD_TARGET,
        goal="cold-engine",
    ),
    Comparison(
        name="cold, 0 workers / engine",
        over=(PRODUCT, "cold"),
        under=(ENGINE, "cold"),
        target=COLD_TARGET,
        goal="cold-engine",
    ),
    Comparison(
        name="cold from the open data set on, 2 workers / engine",
        over=(PRODUCT_2, "cold"),
        under=(ENGINE, "cold"),
        figure="samples/s from the open data set on",
    ),
    Comparison(
        name="cold from the open data set on, 0 workers / engine",
        over=(PRODUCT, "cold"),
        under=(ENGINE, "cold"),
        figure="samples/s from the open data set on",
    ),
    Comparison(name="cold without shards.json / engine", over=(PRODUCT_UNCOUNTED, "cold"), under=(ENGINE, "cold")),
    Comparison(
        name="warm, 0 workers / pread",
        over=(PRODUCT, "warm"),
        under=(PREAD, "warm"),
        target=WARM_TARGET,
        goal="warm-pread",
    ),
    Comparison(
        name="warm, 2 workers / pread, 2 processes",
        over=(PRODUCT_2, "warm"),
        under=(PREAD_2, "warm"),
        target=WARM_TARGET,
        goal="warm-pread",
    ),
    Comparison(name="warm, 0 workers / pread holding a batch", over=(PRODUCT, "warm"), under=(PREAD_BATCH, "warm")),
    Comparison(name="warm, 2 workers / pread holding a batch", over=(PRODUCT_2, "warm"), under=(PREAD_BATCH_2, "warm")),
    Comparison(name="from disk, 0 workers / pread", over=(PRODUCT, "disk"), under=(PREAD, "disk")),
    Comparison(name="from disk, 2 workers / pread, 2 processes", over=(PRODUCT_2, "disk"), under=(PREAD_2, "disk")),
    *(
        Comparison(
            name=f"cold, 2 workers / {rival.label}",
            over=(PRODUCT_2, "cold"),
            under=(rival.named(2), "cold"),
            target=2,
            goal="cold-peers",
        )
        for rival in RIVALS_SHARED
    ),
    *(
        Comparison(
            name=f"warm, 2 workers / {rival.label}",
            over=(PRODUCT_2, "warm"),
            under=(rival.named(2), "warm"),
            target=10,
            goal="warm-peers-2",
        )
        for rival in rivals.CACHING
    ),
    *(
        Comparison(
            name=f"warm, 0 workers / {rival.label}",
            over=(PRODUCT, "warm"),
            under=(rival.named(0), "warm"),
            target=10,
            goal="warm-peers-0",
        )
        for rival in RIVALS_ALONE
    ),
    *(
        Comparison(
            name=f"first batch, cold, {workers} workers / GET of its window",
            over=(product, "cold"),
            under=(FIRST_WINDOW, "cold"),
            figure=figure,
            target=1.5,
            at_most=True,
            goal="first-batch-cold",
        )
        for workers, product in ((0, PRODUCT), (2, PRODUCT_2))
        for figure in ("first batch s from the open data set on", "first batch s")
    ),
    Comparison(
        name="first batch, warm, 2 workers, s",
        over=(PRODUCT_2, "warm"),
        under=None,
        figure="first batch s",
        target=0.3,
        at_most=True,
        goal="first-batch-warm",
    ),
    *(
        Comparison(
            name=f"{figure}, {phase}, 2 workers / {rival.label}",
            over=(PRODUCT_2, phase),
            under=(rival.named(2), phase),
            figure=figure,
            target=1,
            at_most=True,
            goal=goal,
        )
        for figure, phase, goal, of in (
            ("CPU s/GB", "cold", "cpu-cold", RIVALS_SHARED),
            ("CPU s/GB", "warm", "cpu-warm", rivals.CACHING),
            ("RSS MB", "warm", "rss", rivals.CACHING),
        )
        for rival in of
    ),
)

NOTES = (
    "Ratios are computed within each round and their median is shown: what slows a whole round cancels out. Every run "
    "is a fresh process with an empty directory of its own; before it, the store's files are read once, and the "
    "machine is waited for until others use at most 0.3 of a core (or 20 s have passed). Rounds are interleaved.",
    "Client, daemon and store share the cores of one machine, and the store takes a large part of them.",
    "cold: from the construction of the data set to the last sample, the start of the private daemon included, imports "
    "not. The engine's ceiling writes whole shards to files, with the daemon's range size and number of requests in "
    "flight, and has no samples. The scenario fetch-cost has it with fewer requests, too.",
    "warm: the epochs after the first in the same process, together; workers stay alive (persistent_workers) in every "
    "loader. disk: one more epoch after the cached files were written back and dropped from memory, without peers.",
    "first batch: against the time in which the engine alone writes the first window, which is one shard, to a file. "
    "The product's includes the start of its daemon and the opening of the data set, unless the line says otherwise.",
    "pread reads the packed shards' sample ranges in the order of the product's second epoch, one sample at a time "
    "into memory that it reuses; the variant that holds a batch has to use fresh memory, as a loader does.",
    "webdataset opens shards by the fastest of three ways tried here: its gopen hook with obstore streaming, ahead of "
    "pipe:curl and of boto3.",
    "With shards.json beside the shards nothing has to be counted; the variant without it counts before its first "
    "epoch, inside the clock.",
    "Every phase is checked for its number of samples and bytes, and every run ends with an untimed pass whose keys "
    "and bytes are compared with what was packed. Samples are random bytes.",
    "CPU is user and system time from /proc, in ticks of 10 ms; others means all that is neither client, daemon nor "
    "store, kernel threads included. RSS is the peak of single processes; shared pages count in each. Origin bytes are "
    "the store's own count of object bodies sent.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoEpochs:
    """The scenario.

    Attributes:
        samples: Size of the data set.
        sample_bytes: Payload of one sample.
        shards: Number of tar files.
        warm_epochs: Epochs in the warm phase.
    """

    theme: ClassVar[str] = "two-epochs"
    labels: ClassVar[Sequence[str]] = LABELS

    samples: int = 10_240
    sample_bytes: int = 100_000
    shards: int = 16
    warm_epochs: int = 2

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:
        """Pack, start the store, upload twice (with counts beside the shards and without)."""
        size = TwoEpochs(samples=512, sample_bytes=10_000, shards=4, warm_epochs=1) if small else self
        packed = pack(folder / "packed", samples=size.samples, sample_bytes=size.sample_bytes, shards=size.shards)
        with ground(folder, packed, warm_epochs=size.warm_epochs) as there:
            uncounted = there.running.upload(packed, "uncounted/", with_counts=False)
            entries = self._entries(
                there.task(0),
                there.task(2),
                there.task(2, store=uncounted),
                first_shard=reads_of_epoch(packed, epoch=0, batch_size=BATCH_SIZE)[0][0][0],
            )
            for rival in RIVALS_SHARED:
                workers = (0, 2) if rival in RIVALS_ALONE else (2,)
                entries += there.rival_entries(rival, workers, script="epochs:Epochs")
            yield there.prepared(
                entries,
                comparisons=COMPARISONS,
                rivals=RIVALS_SHARED,
                notes=NOTES,
                sizes={
                    **asdict(size),
                    "shards": f"{size.shards} tars of {packed.sizes_bytes[0] / 1e6:.1f} MB by webdataset.ShardWriter",
                    "transform": "none",
                },
            )

    def _entries(self, alone: Task, shared: Task, uncounted: Task, *, first_shard: int) -> list[Entry]:
        def pread(label: str, task: Task, *, keep_batch: bool) -> Entry:
            return Entry(
                label=label,
                factory="benchmarks.contestants.pread:Pread",
                options={"keep_batch": keep_batch},
                task=task,
            )

        def loader(label: str, task: Task, name: str) -> Entry:
            return Entry(
                label=label, factory="benchmarks.contestants.epochs:Epochs", options={"loader": name}, task=task
            )

        product = "benchmarks.contestants.cacheloader:CacheloaderLoader"
        return [
            Entry(label=ENGINE, factory="benchmarks.contestants.engine:Engine", task=alone),
            Entry(
                label=FIRST_WINDOW,
                factory="benchmarks.contestants.engine:Engine",
                options={"first": first_shard},
                task=alone,
            ),
            pread(PREAD, alone, keep_batch=False),
            pread(PREAD_2, shared, keep_batch=False),
            pread(PREAD_BATCH, alone, keep_batch=True),
            pread(PREAD_BATCH_2, shared, keep_batch=True),
            loader(PRODUCT, alone, product),
            loader(PRODUCT_2, shared, product),
            loader(PRODUCT_UNCOUNTED, uncounted, product),
        ]


SCENARIO = TwoEpochs()
