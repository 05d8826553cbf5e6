"""A modelled job: ranks in step, each with its own part of the shards, a new order every epoch."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cacheloader_daemon.simulator.settings import Settings


class EpochPlan:
    """What one rank reads in one epoch.

    Attributes:
        shards: int32 [n], in the order of its windows.
        first_row: int64 [n]; first row, in the epoch, of the shard's window.
        stop_row: int64 [n].
        window_start: Index of the first shard of each window, and ``n``.
        num_rows: Rows of the epoch.
    """

    def __init__(self, shards: NDArray[np.int32], *, shuffle_window: int, rows_per_shard: int) -> None:
        self.shards = shards
        self.window_start = _windows(len(shards), shuffle_window)
        edges = np.array(self.window_start, dtype=np.int64)
        sizes = np.diff(edges)
        self.first_row = np.repeat(edges[:-1], sizes) * rows_per_shard
        self.stop_row = np.repeat(edges[1:], sizes) * rows_per_shard
        self.num_rows = len(shards) * rows_per_shard
        self._rows_per_shard = rows_per_shard

    def window_of(self, row: int) -> int:
        """The window that a row lies in; the number of windows behind the last one."""
        return bisect_right(self.window_start, row // self._rows_per_shard) - 1

    def shards_of(self, window: int) -> list[int]:
        """The shards of one window."""
        shards: list[int] = self.shards[self.window_start[window] : self.window_start[window + 1]].tolist()
        return shards


def _windows(num_shards: int, shuffle_window: int) -> list[int]:
    """Edges of windows that grow 1, 2, 4 … so that the first batch waits for one shard."""
    edges, size = [0], 1
    while edges[-1] < num_shards:
        edges.append(min(edges[-1] + size, num_shards))
        size = min(2 * size, shuffle_window)
    return edges


class JobOrder:
    """All ranks' plans of all epochs, computed when they are asked for.

    Args:
        settings: Shards, ranks, windows.
        seed: Of this job.
    """

    def __init__(self, settings: Settings, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        # Parts do not move between epochs, so a rank meets the same shards in each.
        dealt = np.random.default_rng([seed, 0]).permutation(settings.num_shards).astype(np.int32)
        self._parts = np.array_split(dealt, settings.num_ranks)
        self._plans: dict[tuple[int, int], EpochPlan] = {}

    @property
    def rows_per_epoch(self) -> int:
        """Of the rank with most shards."""
        return max(map(len, self._parts)) * self._settings.samples_per_shard

    def plan(self, rank: int, epoch: int) -> EpochPlan:
        """What ``rank`` reads in ``epoch``."""
        plan = self._plans.get((rank, epoch))
        if plan is None:
            generator = np.random.default_rng([self._seed, 1 + epoch, rank])
            plan = EpochPlan(
                generator.permutation(self._parts[rank]),
                shuffle_window=self._settings.shuffle_window,
                rows_per_shard=self._settings.samples_per_shard,
            )
            self._plans = {key: kept for key, kept in self._plans.items() if key[1] >= epoch - 1}
            self._plans[rank, epoch] = plan
        return plan
