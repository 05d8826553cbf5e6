"""Ceiling of a warm epoch with a transform: pread and decode in a plain loop, in as many processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from benchmarks.contestants.pread import Pread
from benchmarks.harness import page_cache

if TYPE_CHECKING:
    from benchmarks.harness.contestant import Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter


class BareDecode(Pread):
    """Pixels are made and dropped; nobody receives them.

    What the loop frees, the C library keeps. By default it gives the pages of every picture back to the kernel and
    takes them again for the next, or does not, as chance lays out the heap of the process: the same loop is a fifth
    slower in some runs than in others, and would be no ceiling.
    """

    def prepare(self, task: Task) -> None:
        """Import the decoder, open the shards and read the order."""
        from benchmarks.peers.decoding import decode
        from cacheloader.heap import keep_freed_memory

        self._decode = decode
        keep_freed_memory()  # also in the processes that are forked
        super().prepare(task)

    def run(self, task: Task, meter: Meter) -> Measurement:
        """Warm, in as many processes as the loader has workers."""
        processes = max(1, task.num_workers)
        page_cache.warm(self._paths)
        with meter.phase("warm", page_cache="shards in memory, read once before") as clock:
            self._deliver(clock, processes, passes=task.warm_epochs)
        meter.verify((key, self._decode(payload).tobytes()) for key, payload in self._samples())
        return meter.measurement({"processes": processes})

    def _read(self, batches: list[list[tuple[int, int, int]]], passes: int) -> tuple[int, int]:
        size_bytes = 0
        for _ in range(passes):
            for batch in batches:
                for read in batch:
                    size_bytes += self._decode(os.pread(*read)).nbytes
        return passes * sum(map(len, batches)), size_bytes
