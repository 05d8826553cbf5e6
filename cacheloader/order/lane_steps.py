"""Steps over lanes: which places of an epoch a rank and a worker take, whatever lies there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LaneSteps:
    """Lanes of an epoch, cut into steps. A step of global batch B takes the next B / lanes rows of every lane.

    Args:
        num_samples: Samples of an epoch, over all lanes.
        lanes: 1 or more.
        tail: What becomes of a last step that is not full: ``"drop"``, ``"pad"`` and ``"keep"`` as in
            ``OrderOptions``; with ``"carry"`` it goes on into the next epoch.

    Attributes:
        num_samples: As given.
        lanes: As given.
        tail: As given.
        full_rows: Rows that hold a sample of every lane. If lanes do not divide the samples, one more row follows, in
            which only the first lanes have a sample.
    """

    def __init__(self, *, num_samples: int, lanes: int, tail: str) -> None:
        self.num_samples = num_samples
        self.lanes = lanes
        self.tail = tail
        self.full_rows, self._longer_lanes = divmod(num_samples, lanes)

    @property
    def rows_per_epoch(self) -> int:
        """Rows of an epoch, counting a last one that only some lanes have. Does not depend on the batch size."""
        return self.full_rows + (self._longer_lanes > 0)

    def lane_lengths(self, first_lane: int, stop_lane: int) -> NDArray[np.int64]:
        """Samples of each of the lanes ``[first_lane, stop_lane)`` in an epoch; they differ by at most one."""
        return self.full_rows + (np.arange(first_lane, stop_lane, dtype=np.int64) < self._longer_lanes)

    def lanes_of(self, *, global_batch: int, rank: int, world_size: int) -> tuple[int, int]:
        """The first lane that a rank reads, and one past the last."""
        return self._rank_lanes(*self._rank_places(global_batch, rank, world_size), self.rows_per_step(global_batch))

    def clock(self, *, epoch: int, row: int) -> int:
        """Rows counted over all epochs: never falls from step to step, whatever the batch sizes.

        Args:
            epoch: 0 or more.
            row: Rows consumed in this epoch. Behind a last step that was not full they may exceed the epoch's rows;
                unless the step went on into the next epoch, that counts as the epoch's end, or the start of the next
                epoch would seem to be over.
        """
        rows = self.rows_per_epoch
        return epoch * rows + (row if self.tail == "carry" else min(row, rows))

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
        if self.tail == "drop":
            return max(0, (self.full_rows - row) // step_rows)
        return max(0, -((row - self.rows_per_epoch) // step_rows))

    def next_epoch(self, *, epoch: int, row: int, global_batch: int) -> tuple[int, int]:
        """Epoch and row at which to go on when no step of this epoch is left.

        Args:
            epoch: 0 or more.
            row: A row of this epoch at which a step starts, or ended.
            global_batch: Samples of one step over all ranks.
        """
        if self.tail != "carry":
            return epoch + 1, 0
        stop = row + self.steps_remaining(row=row, global_batch=global_batch) * self.rows_per_step(global_batch)
        later, row = divmod(stop, self.rows_per_epoch)
        return epoch + later, row

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
        if self.tail != "keep" or not steps:
            return steps * batch
        # All steps but the last are full, and so may the last be.
        left = self.full_rows - row - (steps - 1) * step_rows
        first_lane, stop_lane = self._rank_lanes(first_place, stop_place, step_rows)
        lane = np.arange(first_lane, stop_lane, dtype=np.int64)
        first = np.maximum(first_place - lane * step_rows, 0)
        stop = np.minimum(np.minimum(stop_place - lane * step_rows, step_rows), left + (lane < self._longer_lanes))
        return (steps - 1) * batch + int(np.maximum(stop - first, 0).sum())

    def _step_places(
        self, *, epoch: int, row: int, global_batch: int, rank: int, world_size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Lane and row of each place of a rank in the step that starts at ``row``, and whether it fills up the step.

        Raises:
            ConfigError: The global batch is no multiple of lanes or ranks, or the rank is not in the world.
            IndexError: No step of the epoch starts there: ``steps_remaining`` is 0.
        """
        first_place, stop_place = self._rank_places(global_batch, rank, world_size)
        step_rows = self.rows_per_step(global_batch)
        if epoch < 0 or row < 0 or not self.steps_remaining(row=row, global_batch=global_batch):
            raise IndexError(
                f"no step of global batch {global_batch} starts at row {row} of epoch {epoch}: an epoch has "
                f"{self.rows_per_epoch} rows and tail={self.tail!r}"
            )
        place = np.arange(first_place, stop_place, dtype=np.int64)
        lane = place // step_rows
        lane_row = place - lane * step_rows + row
        padded = np.zeros(len(place), dtype=np.bool_)
        if row + step_rows > self.full_rows and self.tail != "carry":
            lane_rows = self.full_rows + (lane < self._longer_lanes)
            padded = lane_row >= lane_rows
            if self.tail == "keep":
                lane, lane_row, padded = lane[~padded], lane_row[~padded], padded[~padded]
            else:
                # A data set smaller than the lanes has one sample in each of the first ones and none in the others.
                lane = np.where(lane_rows > 0, lane, lane % self.num_samples)
                lane_row %= np.maximum(lane_rows, 1)
        return lane, lane_row, padded

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


def _nearest_multiples(value: int, factor: int) -> str:
    below = value // factor * factor
    return f"{below} or {below + factor}" if below > 0 else f"{factor} or a multiple of it"
