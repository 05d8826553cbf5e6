"""Floor of waiting: batches that lie in memory, whole, and are handed over by a thread through a queue."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contestants.pread import HEADER_BYTES, key_of
from benchmarks.peers.keyed_batches import KeyedBatches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.meter import PhaseClock

_DEPTH = 4


class FromMemory(KeyedBatches):
    """A loader with nothing left to do but to hand over, in the fewest lines that python has for it."""

    is_cached = True

    def prepare(self, task: Task) -> None:
        """Read everything."""
        shards = [Path(task.source_folder, name).read_bytes() for name in task.shard_names]
        self._batches = [
            {
                "key": [key_of(shards[shard][start - HEADER_BYTES : start]) for shard, start, _ in batch],
                "bin": [shards[shard][start:stop] for shard, start, stop in batch],
            }
            for batch in json.loads(Path(task.reads).read_text())
        ]

    def open(self, task: Task, clock: PhaseClock) -> Iterable[Any]:
        """Itself."""
        del task, clock
        return self

    def __iter__(self) -> Iterator[Any]:
        ready: queue.Queue[Any] = queue.Queue(_DEPTH)
        thread = threading.Thread(target=lambda: [ready.put(batch) for batch in [*self._batches, None]], daemon=True)
        thread.start()
        while (batch := ready.get()) is not None:
            yield batch

    @property
    def configuration(self) -> dict[str, Any]:
        """How it was set up."""
        return {"loader": "a thread puts batches that lie in memory into a queue.Queue", "depth": _DEPTH}
