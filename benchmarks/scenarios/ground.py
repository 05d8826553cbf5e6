"""What most scenarios stand on: packed tars, a store that has them, tasks that name both."""

from __future__ import annotations

import json
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from benchmarks.contestants.cacheloader import reads_of_epoch
from benchmarks.harness.contestant import Store, Task
from benchmarks.harness.store import running_store
from benchmarks.scenarios.rivals import missing
from benchmarks.scenarios.scenario import Prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.harness.packing import PackedShards
    from benchmarks.harness.report import Comparison
    from benchmarks.harness.runner import Entry
    from benchmarks.harness.store import RunningStore
    from benchmarks.scenarios.rivals import Rival

BATCH_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Data set and store.

    Attributes:
        folder: Scratch directory.
        packed: The tars on disk.
        running: The store.
        tars: Where they lie in it, counts beside them.
        reads: File with the order of the product's second epoch.
        warm_epochs: Epochs in a warm phase.
        unprepared: Notes about peers that could not be prepared.
    """

    folder: Path
    packed: PackedShards
    running: RunningStore
    tars: Store
    reads: Path
    warm_epochs: int
    unprepared: list[str] = field(default_factory=list)

    def task(self, num_workers: int, *, store: Store | None = None) -> Task:
        """A task for so many workers, on the tars if no other place is named."""
        return Task(
            folder="",
            source_folder=str(self.packed.folder),
            reads=str(self.reads),
            shard_names=self.packed.names,
            shard_bytes=self.packed.sizes_bytes,
            store=store or self.tars,
            expected=self.packed.expected,
            batch_size=BATCH_SIZE,
            num_workers=num_workers,
            warm_epochs=self.warm_epochs,
            server_pid=self.running.server.pid,
            metrics_url=self.running.metrics_url,
        )

    def rival_entries(self, rival: Rival, workers: tuple[int, ...], *, script: str) -> list[Entry]:
        """A peer with each number of workers, on its own copy of the data set.

        Nothing, and a note for the report, if it has no environment or could not write its copy.
        """
        if not rival.is_there:
            return []
        try:
            store = rival.store(self.tars, packed=self.packed, running=self.running, folder=self.folder / "converted")
        except (subprocess.SubprocessError, OSError) as error:
            how = type(error).__name__
            self.unprepared.append(f"{rival.label} did not take part: its copy of the data set failed ({how}).")
            return []
        tasks = [replace(self.task(number, store=store), has_disk_epoch=False) for number in workers]
        return [rival.entry(task, script=script) for task in tasks]

    def prepared(
        self,
        entries: Sequence[Entry],
        *,
        comparisons: Sequence[Comparison],
        rivals: tuple[Rival, ...],
        notes: Sequence[str],
        sizes: dict[str, Any],
    ) -> Prepared:
        """A scenario on this ground, ready to run.

        Args:
            entries: Contestants, in the order of each round.
            comparisons: Ratios that the report shows.
            rivals: Peers that should take part; the report names those that could not.
            notes: What the reader has to know besides.
            sizes: What the scenario chose, for the report.
        """
        return Prepared(
            entries=entries,
            comparisons=comparisons,
            parameters={**sizes, "batch_size": BATCH_SIZE, "store": "SeaweedFS on the same machine, loopback"},
            notes=[*notes, *missing(rivals), *self.unprepared],
            before_each=self.running.warm,
        )


@contextmanager
def ground(folder: Path, packed: PackedShards, *, warm_epochs: int) -> Iterator[Ground]:
    """Start a store and upload the tars."""
    reads = folder / "reads.json"
    reads.write_text(json.dumps(reads_of_epoch(packed, epoch=1, batch_size=BATCH_SIZE)))
    with running_store(folder / "store") as running:
        tars = running.upload(packed, "counted/", with_counts=True)
        yield Ground(
            folder=folder,
            packed=packed,
            running=running,
            tars=tars,
            reads=reads,
            warm_epochs=warm_epochs,
        )
