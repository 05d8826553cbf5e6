"""The script that every loader follows: a cold epoch, warm epochs, an epoch from disk, and one that is verified."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import page_cache

if TYPE_CHECKING:
    from benchmarks.harness.contestant import Loader, Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter


class Epochs:
    """Drives one loader.

    Args:
        loader: ``"module:callable"`` that makes it.
        options: Keyword arguments of that.
    """

    def __init__(self, *, loader: str, options: dict[str, Any] | None = None) -> None:
        module, _, name = loader.partition(":")
        self._loader: Loader = getattr(import_module(module), name)(**(options or {}))

    def prepare(self, task: Task) -> None:
        """Let the library be imported."""
        self._loader.prepare(task)

    def run(self, task: Task, meter: Meter) -> Measurement:
        """Cold with an empty cache; warm from the cache in memory; then from the cache on disk."""
        loader = self._loader
        try:
            with meter.phase("cold", page_cache="empty cache; the store's files in memory") as clock:
                batches = loader.open(task, clock)
                clock.take(batches, loader.count)
            if loader.is_cached:
                with meter.phase("warm", page_cache="cached files in memory, as the epochs before left them") as clock:
                    for _ in range(task.warm_epochs):
                        clock.take(batches, loader.count)
            if loader.is_cached and task.has_disk_epoch:
                page_cache.drop(page_cache.files_below(Path(task.folder)))
                with meter.phase("disk", page_cache="cached files written back and dropped from memory") as clock:
                    clock.take(batches, loader.count)
            meter.verify(item for batch in batches for item in loader.items(batch))
        finally:
            loader.close()
        return meter.measurement(loader.configuration)
