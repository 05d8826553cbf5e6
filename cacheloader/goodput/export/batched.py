"""What the exporters share: steps are gathered, and sent a few dozen at a time."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An attempt that begins.

    Attributes:
        run: Name of the run.
        attempt: Name of the launch.
        step: It goes on behind this step.
        run_start_s: When the run began, with its first attempt, since 1970.
        folder: The run's folder.
    """

    run: str
    attempt: str
    step: int
    run_start_s: float
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What some steps had in common.

    Attributes:
        step: The last of them.
        wall_s: When it ended, since 1970.
        step_s: Median duration of a step.
        fetch_p50_s: Median wait for a batch.
        fetch_max_s: Longest.
        tokens_per_s: Tokens of rank 0 in a second.
    """

    step: int
    wall_s: float
    step_s: float
    fetch_p50_s: float
    fetch_max_s: float
    tokens_per_s: float

    def named(self) -> dict[str, float]:
        """By the names that all exporters use."""
        return {
            "cacheloader/fetch_seconds_p50": self.fetch_p50_s,
            "cacheloader/fetch_seconds_max": self.fetch_max_s,
            "training/step_seconds": self.step_s,
            "training/tokens_per_second": self.tokens_per_s,
        }


class Batched(ABC):
    """A hook that sends one row for several steps. Whatever goes wrong in it is logged once and stops it, not the job.

    Args:
        every: Steps for one row.
    """

    def __init__(self, *, every: int = 20) -> None:
        self._every = max(1, every)
        self._steps: list[tuple[float, float, int]] = []
        self._last_step = 0
        self._is_broken = False
        self.started: Started

    def start(self, started: Started) -> None:
        """The attempt begins."""
        self.started = started
        self._guarded(self.open)

    def step(self, step: int, dur_s: float, fetch_s: float, tokens: int, samples: int) -> None:  # noqa: ARG002
        """A step is complete."""
        self._last_step = step
        self._steps.append((dur_s, fetch_s, tokens))
        if len(self._steps) >= self._every:
            self._flush()

    def finish(self) -> None:
        """The attempt ends: send what is left, and the account as far as rank 0 can see it."""
        self._flush()
        if not self._is_broken:
            self._guarded(lambda: self.summary(self._account()))
            self._guarded(self.close)

    @abstractmethod
    def open(self) -> None:
        """Begin."""

    @abstractmethod
    def send(self, row: Row) -> None:
        """Send one row."""

    @abstractmethod
    def summary(self, numbers: dict[str, float]) -> None:
        """Send the account at the end of an attempt."""

    @abstractmethod
    def close(self) -> None:
        """End."""

    def _flush(self) -> None:
        steps, self._steps = self._steps, []
        if not steps or self._is_broken:
            return
        total_s = sum(dur_s for dur_s, _, _ in steps)
        row = Row(
            step=self._last_step,
            wall_s=time.time(),
            step_s=median(dur_s for dur_s, _, _ in steps),
            fetch_p50_s=median(fetch_s for _, fetch_s, _ in steps),
            fetch_max_s=max(fetch_s for _, fetch_s, _ in steps),
            tokens_per_s=sum(tokens for _, _, tokens in steps) / total_s if total_s else 0.0,
        )
        self._guarded(lambda: self.send(row))

    def _account(self) -> dict[str, float]:
        from cacheloader.goodput.categories import Category
        from cacheloader.goodput.folder import EventFolder
        from cacheloader.goodput.ledger import Ledger

        ledger = Ledger()
        for block in EventFolder(self.started.folder).blocks():
            ledger.add(block)
        account = ledger.account()
        shares = {
            f"goodput/share/{category.label}": account.totals[category] / account.paid_ns if account.paid_ns else 0.0
            for category in Category
        }
        return {"goodput/ratio": account.goodput_time, "goodput/work_ratio": account.goodput_work, **shares}

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # The outer edge to somebody else's package: training goes on without it.
            self._is_broken = True
            log.exception("%s failed; this attempt goes on without it", type(self).__name__)
