"""A training loop whose step takes longer than its data: what still shows of the loader is stall."""

from __future__ import annotations

import time
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.harness.contestant import Loader, Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter


class Paced:
    """Drives one loader.

    Args:
        loader: ``"module:callable"`` that makes it.
        step_s: Time of one step. The thread sleeps, as one does that waits for a device.
        options: Keyword arguments of the loader.
    """

    def __init__(self, *, loader: str, step_s: float, options: dict[str, Any] | None = None) -> None:
        module, _, name = loader.partition(":")
        self._loader: Loader = getattr(import_module(module), name)(**(options or {}))
        self._step_s = step_s

    def prepare(self, task: Task) -> None:
        """Let the library be imported."""
        self._loader.prepare(task)

    def run(self, task: Task, meter: Meter) -> Measurement:
        """A cold epoch, warm ones, and one that is verified."""
        loader = self._loader
        step = partial(time.sleep, self._step_s)
        try:
            with meter.phase("cold", page_cache="empty cache; the store's files in memory") as clock:
                batches = loader.open(task, clock)
                clock.take(batches, loader.count, step=step)
            if loader.is_cached:
                with meter.phase("warm", page_cache="cached files in memory, as the epoch before left them") as clock:
                    for _ in range(task.warm_epochs):
                        clock.take(batches, loader.count, step=step)
            meter.verify(item for batch in batches for item in loader.items(batch))
        finally:
            loader.close()
        return meter.measurement(loader.configuration | {"step": f"{self._step_s * 1e3:g} ms asleep"})
