"""How much longer steps take while a save is still under way behind them, and how much they vary for no named reason.

Both are figures beside the partition, not categories of it: the time is computing, only slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.goodput.track import median_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheloader.goodput.account import Account, Save

MIN_STEPS = 5
"""Of each kind; a median of fewer says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Steps of kept work while uploads ran, against the others.

    A step's time is without its fetch, marks inside it, waiting for slower ranks and hangs.

    Attributes:
        during_steps: Steps, of every rank, that lie wholly between the return of a save and its end.
        clear_steps: Steps that touch no save.
        during_ns: Median of the former.
        clear_ns: Median of the latter.
        cost_ns: Device time: for each rank and attempt the difference of its medians times its steps during uploads;
            negative where they were faster.
        jitter_ns: Device time: what clear steps took beyond their rank's median.
    """

    during_steps: int
    clear_steps: int
    during_ns: int
    clear_ns: int
    cost_ns: int
    jitter_ns: int

    @property
    def is_known(self) -> bool:
        """Whether there were enough steps of both kinds."""
        return self.during_steps >= MIN_STEPS and self.clear_steps >= MIN_STEPS


def interference(account: Account) -> Interference:
    """Measure it in one account. Source of the definitions: rows 9 and 30 of the project's goodput vectors."""
    during_all, clear_all = [], []
    cost_ns = jitter_ns = 0
    begins, reached = _spans([(save.begin_ns, save.end_ns) for save in account.saves if save.end_ns is not None])
    uploads = [(save.begin_ns + save.stall_ns, save.end_ns) for save in account.saves if _has_upload(save)]
    upload_begins, upload_reached = _spans(uploads)
    for (is_kept, paint), idle_ns in zip(account.steps.rows, account.steps.idle_ns, strict=True):
        busy_ns = paint.busy_ns()
        if not len(busy_ns):
            continue
        own_ns = np.maximum(busy_ns - idle_ns, 0)
        is_clear = is_kept & ~_touches(paint.start_ns, paint.end_ns, begins, reached)
        is_during = is_kept & _within(paint.start_ns, paint.end_ns, upload_begins, upload_reached)
        during, clear = own_ns[is_during], own_ns[is_clear]
        during_all.append(during)
        clear_all.append(clear)
        if len(clear) >= MIN_STEPS:
            usual_ns = median_ns(clear)
            jitter_ns += int(np.maximum(clear - usual_ns, 0).sum())
            if len(during) >= MIN_STEPS:
                cost_ns += (median_ns(during) - usual_ns) * len(during)
    none = np.zeros(0, dtype=np.int64)
    during, clear = np.concatenate([none, *during_all]), np.concatenate([none, *clear_all])
    return Interference(
        during_steps=len(during),
        clear_steps=len(clear),
        during_ns=median_ns(during),
        clear_ns=median_ns(clear),
        cost_ns=cost_ns,
        jitter_ns=jitter_ns,
    )


def _has_upload(save: Save) -> bool:
    return save.end_ns is not None and save.end_ns > save.begin_ns + save.stall_ns


def _spans(found: Sequence[tuple[int, int | None]]) -> tuple[np.ndarray, np.ndarray]:
    """Begins in order, and how far the spans up to each reach."""
    spans = np.array(sorted(found), dtype=np.int64).reshape(-1, 2)
    return spans[:, 0], np.maximum.accumulate(spans[:, 1]) if len(spans) else spans[:, 1]


def _touches(start_ns: np.ndarray, end_ns: np.ndarray, begins: np.ndarray, reached: np.ndarray) -> np.ndarray:
    last = np.searchsorted(begins, end_ns, side="left") - 1
    found: np.ndarray = (last >= 0) & (reached[last] > start_ns) if len(begins) else np.zeros(len(start_ns), dtype=bool)
    return found


def _within(start_ns: np.ndarray, end_ns: np.ndarray, begins: np.ndarray, reached: np.ndarray) -> np.ndarray:
    last = np.searchsorted(begins, start_ns, side="right") - 1
    found: np.ndarray = (last >= 0) & (reached[last] >= end_ns) if len(begins) else np.zeros(len(start_ns), dtype=bool)
    return found
