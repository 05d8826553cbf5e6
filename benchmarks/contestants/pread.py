"""Ceiling of a warm epoch: ``os.pread`` of the same sample ranges in the same order, in a plain loop."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import page_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter, PhaseClock

HEADER_BYTES = 512
"""A tar header lies so far before the payload that it is of."""

_PASSES = 4
_TIMEOUT_S = 120.0


class Pread:
    """Reads the packed shards themselves.

    Args:
        keep_batch: Hold the samples of a batch until it is complete, as a loader must, instead of one at a time.
    """

    def __init__(self, *, keep_batch: bool = False) -> None:
        self._keep_batch = keep_batch

    def prepare(self, task: Task) -> None:
        """Open the shards and read the order."""
        self._paths = [Path(task.source_folder, name) for name in task.shard_names]
        descriptors = [os.open(path, os.O_RDONLY) for path in self._paths]
        self._batches = [
            [(descriptors[shard], stop - start, start) for shard, start, stop in batch]
            for batch in json.loads(Path(task.reads).read_text())
        ]

    def run(self, task: Task, meter: Meter) -> Measurement:
        """Warm, then from disk; as many processes as the loader has workers, one if it has none."""
        processes = max(1, task.num_workers)
        page_cache.warm(self._paths)
        passes = task.warm_epochs * _PASSES
        with meter.phase("warm", page_cache="shards in memory, read once before") as clock:
            self._deliver(clock, processes, passes=passes)
        page_cache.drop(self._paths)
        with meter.phase("disk", page_cache="shards dropped from memory") as clock:
            self._deliver(clock, processes, passes=1)
        meter.verify(self._samples())
        return meter.measurement({"processes": processes, "holds a batch": self._keep_batch})

    def _deliver(self, clock: PhaseClock, processes: int, *, passes: int) -> None:
        if processes == 1:
            found = [self._read(self._batches, passes)]
        else:
            fork = multiprocessing.get_context("fork")
            results = fork.SimpleQueue()
            readers = [
                fork.Process(target=lambda i=i: results.put(self._read(self._batches[i::processes], passes)))
                for i in range(processes)
            ]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join(_TIMEOUT_S)
                if reader.exitcode != 0:
                    raise RuntimeError(f"a reader ended with status {reader.exitcode}")
            found = [results.get() for _ in readers]
        clock.end_epoch(passes=passes)
        clock.add(samples=sum(samples for samples, _ in found), size_bytes=sum(size for _, size in found))

    def _read(self, batches: list[list[tuple[int, int, int]]], passes: int) -> tuple[int, int]:
        pread = os.pread
        size_bytes = 0
        for _ in range(passes):
            for batch in batches:
                if self._keep_batch:
                    held = [pread(*read) for read in batch]
                    size_bytes += sum(map(len, held))
                else:
                    for read in batch:
                        size_bytes += len(pread(*read))
        return passes * sum(map(len, batches)), size_bytes

    def _samples(self) -> Iterator[tuple[str, bytes]]:
        for batch in self._batches:
            for descriptor, size_bytes, start in batch:
                header = os.pread(descriptor, HEADER_BYTES, start - HEADER_BYTES)
                yield key_of(header), os.pread(descriptor, size_bytes, start)


def key_of(header: bytes) -> str:
    """Key of the sample that a tar header is of: the file's name up to its first dot."""
    return header[:100].split(b"\0", 1)[0].decode().partition(".")[0]
