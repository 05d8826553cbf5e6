"""The order of a data set: which samples a rank reads in which step, from any position on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.errors import ConfigError
from cacheloader.order.access_rows import window_reads
from cacheloader.order.lanes import LaneCut, shard_order
from cacheloader.order.places import Accesses, Places
from cacheloader.order.windows import EpochWindows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cacheloader.order.options import OrderOptions

_KEPT_LAYOUTS = 4


class SampleOrder:
    """A pure function from (epoch, row, global batch, rank) to samples; see docs/order.md.

    A step of global batch B that starts at row ``row`` takes the samples of rows ``[row, row + B / lanes)`` of every
    lane. What it remembers between calls (lane cuts, permuted shards) only saves time, so calls may come in any order
    and from several threads. A data set without samples has epochs without steps.

    Args:
        samples_per_shard: int64 [shards], each 0 or more; the manifest's ``num_samples``.
        options: What else the order depends on.

    Attributes:
        num_samples: Samples in the data set.
        lanes: Number of lanes.
        full_rows: Rows that hold a sample of every lane. If lanes do not divide the data set, one more row follows, in
            which only the first lanes have a sample.

    Raises:
        ConfigError: A sample count is negative.
    """

    def __init__(self, samples_per_shard: NDArray[np.int64], options: OrderOptions) -> None:
        self._samples_per_shard = np.asarray(samples_per_shard, dtype=np.int64)
        if len(self._samples_per_shard) and int(self._samples_per_shard.min()) < 0:
            shard = int(self._samples_per_shard.argmin())
            raise ConfigError(
                f"shard {shard} is said to hold {int(self._samples_per_shard[shard])} samples and a count is 0 or "
                "more; index the data set again"
            )
        self.options = options
        self.num_samples = int(self._samples_per_shard.sum())
        self.lanes = options.lanes
        self.full_rows, self._longer_lanes = divmod(self.num_samples, options.lanes)
        self._cuts: dict[int, LaneCut] = {}
        self._layouts: dict[tuple[int, int, int], EpochWindows] = {}

    @property
    def rows_per_epoch(self) -> int:
        """Rows of an epoch, counting a last one that only some lanes have. Does not depend on the batch size."""
        return self.full_rows + (self._longer_lanes > 0)

    def clock(self, *, epoch: int, row: int) -> int:
        """Rows counted over all epochs: never falls from step to step, whatever the batch sizes.

        Args:
            epoch: 0 or more.
            row: Rows consumed in this epoch. Behind a last step that was not full they may exceed the epoch's rows;
                that counts as the epoch's end, or the start of the next epoch would seem to be over.
        """
        rows = self.rows_per_epoch
        return epoch * rows + min(row, rows)

    def rows_per_step(self, global_batch: int) -> int:
        """Rows that one step takes.

        Args:
            global_batch: Samples of one step over all ranks.

        Raises:
            ConfigError: It is no multiple of the lanes.
        """
        if global_batch < 1 or global_batch % self.lanes:
            raise ConfigError(
                f"a global batch of {global_batch} is no multiple of lanes={self.lanes}, which was fixed when the run "
                f"started; pass {_nearest_multiples(global_batch, self.lanes)}"
            )
        return global_batch // self.lanes

    def steps_remaining(self, *, row: int, global_batch: int) -> int:
        """Steps in the rest of an epoch, equal for all ranks (with ``keep`` a rank's part of the last may be empty).

        Args:
            row: Rows consumed in the epoch, 0 or more.
            global_batch: Samples of one step over all ranks.
        """
        step_rows = self.rows_per_step(global_batch)
        if self.options.tail == "drop":
            return max(0, (self.full_rows - row) // step_rows)
        return max(0, -((row - self.rows_per_epoch) // step_rows))

    def worker_rows(self, *, row: int, global_batch: int, worker: int, num_workers: int) -> range:
        """The rows at which one worker's batches of the rest of the epoch start: whole batches, in turn.

        Args:
            row: Rows consumed in the epoch; worker 0 begins there.
            global_batch: Samples of one step over all ranks.
            worker: ``[0, num_workers)``.
            num_workers: 1 or more.
        """
        if not 0 <= worker < num_workers:
            raise ConfigError(f"worker={worker} is not in [0, {num_workers}); pass the worker's number from 0")
        step_rows = self.rows_per_step(global_batch)
        stop = row + step_rows * self.steps_remaining(row=row, global_batch=global_batch)
        return range(row + worker * step_rows, stop, num_workers * step_rows)

    def batch(self, *, epoch: int, row: int, global_batch: int, rank: int, world_size: int) -> Places:
        """One rank's samples of the step that starts at ``row``.

        Args:
            epoch: 0 or more.
            row: Rows consumed in the epoch before this step.
            global_batch: Samples of the step over all ranks.
            rank: ``[0, world_size)``.
            world_size: Ranks; need not be the number of lanes.

        Returns:
            ``global_batch / world_size`` places, or fewer in the last step of an epoch with ``tail="keep"``.

        Raises:
            ConfigError: The global batch is no multiple of lanes or ranks, or the rank is not in the world.
            IndexError: No step of the epoch starts there: ``steps_remaining`` is 0.
        """
        first_place, stop_place = self._rank_places(global_batch, rank, world_size)
        step_rows = self.rows_per_step(global_batch)
        if epoch < 0 or row < 0 or not self.steps_remaining(row=row, global_batch=global_batch):
            raise IndexError(
                f"no step of global batch {global_batch} starts at row {row} of epoch {epoch}: an epoch has "
                f"{self.rows_per_epoch} rows and tail={self.options.tail!r}"
            )
        place = np.arange(first_place, stop_place, dtype=np.int64)
        lane = place // step_rows
        lane_row = place - lane * step_rows + row
        padded = np.zeros(len(place), dtype=np.bool_)
        if row + step_rows > self.full_rows:
            lane_rows = self.full_rows + (lane < self._longer_lanes)
            padded = lane_row >= lane_rows
            if self.options.tail == "keep":
                lane, lane_row, padded = lane[~padded], lane_row[~padded], padded[~padded]
            else:
                # A data set smaller than the lanes has one sample in each of the first ones and none in the others.
                lane = np.where(lane_rows > 0, lane, lane % self.num_samples)
                lane_row %= np.maximum(lane_rows, 1)
        layout = self._layout(epoch, *self._rank_lanes(first_place, stop_place, step_rows))
        shard, sample = layout.locate(lane, lane_row)
        return Places(shard=shard, sample=sample, lane=lane, row=lane_row, padded=padded)

    def rank_samples_remaining(self, *, row: int, global_batch: int, rank: int, world_size: int) -> int:
        """Samples that one rank still reads in an epoch, padding included.

        Args:
            row: Rows consumed in the epoch.
            global_batch: Samples of one step over all ranks.
            rank: ``[0, world_size)``.
            world_size: Ranks.
        """
        first_place, stop_place = self._rank_places(global_batch, rank, world_size)
        step_rows = self.rows_per_step(global_batch)
        steps = self.steps_remaining(row=row, global_batch=global_batch)
        batch = stop_place - first_place
        if self.options.tail != "keep" or not steps:
            return steps * batch
        # All steps but the last are full, and so may the last be.
        left = self.full_rows - row - (steps - 1) * step_rows
        first_lane, stop_lane = self._rank_lanes(first_place, stop_place, step_rows)
        lane = np.arange(first_lane, stop_lane, dtype=np.int64)
        first = np.maximum(first_place - lane * step_rows, 0)
        stop = np.minimum(np.minimum(stop_place - lane * step_rows, step_rows), left + (lane < self._longer_lanes))
        return (steps - 1) * batch + int(np.maximum(stop - first, 0).sum())

    def accesses(self, *, epoch: int, from_row: int, global_batch: int, rank: int, world_size: int) -> Accesses:
        """The shards that one rank reads in the rest of an epoch, if the global batch stays as it is.

        Every row that reads a shard lies in an access of that shard. Samples are mixed inside a window, so an access
        runs from the first to the last row that this rank reads of the window; samples that fill the last step count
        from that step's first row to the end of the epoch.

        Args:
            epoch: 0 or more.
            from_row: Rows consumed in the epoch.
            global_batch: Samples of one step over all ranks.
            rank: ``[0, world_size)``.
            world_size: Ranks.
        """
        first_place, stop_place = self._rank_places(global_batch, rank, world_size)
        step_rows = self.rows_per_step(global_batch)
        steps = self.steps_remaining(row=from_row, global_batch=global_batch)
        layout = self._layout(epoch, *self._rank_lanes(first_place, stop_place, step_rows))
        shard, first_row, stop_row = window_reads(
            layout,
            from_row=from_row,
            stop_row=from_row + steps * step_rows,
            step_rows=step_rows,
            first_place=first_place,
            stop_place=stop_place,
        )
        if self.options.tail == "pad" and steps:
            last_row = from_row + (steps - 1) * step_rows
            last = self.batch(epoch=epoch, row=last_row, global_batch=global_batch, rank=rank, world_size=world_size)
            added = np.unique(last.shard[last.padded])
            shard = np.concatenate((shard, added))
            first_row = np.append(first_row, np.full(len(added), last_row))
            stop_row = np.append(stop_row, np.full(len(added), self.rows_per_epoch))
        by_row = np.argsort(first_row, kind="stable")
        return Accesses(shard=shard[by_row], first_row=first_row[by_row], stop_row=stop_row[by_row])

    def _rank_places(self, global_batch: int, rank: int, world_size: int) -> tuple[int, int]:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} is not in [0, {world_size}); pass this process's number and the world size")
        if global_batch < 1 or global_batch % world_size or global_batch % self.lanes:
            both = math.lcm(self.lanes, world_size)
            raise ConfigError(
                f"a global batch of {global_batch} is no multiple of world_size={world_size} and "
                f"lanes={self.lanes}; pass {_nearest_multiples(global_batch, both)}"
            )
        batch = global_batch // world_size
        return rank * batch, (rank + 1) * batch

    def _rank_lanes(self, first_place: int, stop_place: int, step_rows: int) -> tuple[int, int]:
        if self.full_rows == 0:
            return 0, self.lanes
        return first_place // step_rows, (stop_place - 1) // step_rows + 1

    def _layout(self, epoch: int, first_lane: int, stop_lane: int) -> EpochWindows:
        key = (epoch, first_lane, stop_lane)
        layout = self._layouts.get(key)
        if layout is None:
            layout = EpochWindows.of(
                self._cut(epoch), options=self.options, epoch=epoch, first_lane=first_lane, stop_lane=stop_lane
            )
            self._layouts = {**dict(list(self._layouts.items())[1 - _KEPT_LAYOUTS :]), key: layout}
        return layout

    def _cut(self, epoch: int) -> LaneCut:
        key = epoch if self.options.redeal else 0
        cut = self._cuts.get(key)
        if cut is None:
            order = shard_order(len(self._samples_per_shard), options=self.options, epoch=key)
            cut = LaneCut.of(self._samples_per_shard, order, lanes=self.lanes)
            self._cuts = {**dict(list(self._cuts.items())[1 - _KEPT_LAYOUTS :]), key: cut}
        return cut


def _nearest_multiples(value: int, factor: int) -> str:
    below = value // factor * factor
    return f"{below} or {below + factor}" if below > 0 else f"{factor} or a multiple of it"
