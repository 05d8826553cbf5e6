"""Weights & Biases: its own step must rise, so that what a resume repeats would be dropped; our x axis is wall time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from cacheloader.goodput.export.batched import Batched

if TYPE_CHECKING:
    from cacheloader.goodput.export.batched import Row


class WandB(Batched):
    """Logs to a wandb run.

    Args:
        run: Which, as ``wandb.init`` returned it.
        every: Steps for one point.
    """

    def __init__(self, run: Any, *, every: int = 20) -> None:
        super().__init__(every=every)
        self._run = run

    def open(self) -> None:
        """Say what the curves are drawn over."""
        self._run.define_metric("goodput/wall_hours", hidden=True)
        for pattern in ("cacheloader/*", "training/*", "goodput/*"):
            self._run.define_metric(pattern, step_metric="goodput/wall_hours")

    def send(self, row: Row) -> None:
        """One point a curve, without wandb's own step."""
        self._log({**row.named(), "training/step": float(row.step)}, row.wall_s)

    def summary(self, numbers: dict[str, float]) -> None:
        """The account."""
        self._log(numbers, time.time())

    def close(self) -> None:
        """The run belongs to the caller."""

    def _log(self, numbers: dict[str, float], wall_s: float) -> None:
        self._run.log({**numbers, "goodput/wall_hours": (wall_s - self.started.run_start_s) / 3600})
