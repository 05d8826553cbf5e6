"""The order of a data set: which samples a rank reads in which step, from any position on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cacheloader.errors import ConfigError
from cacheloader.order.access_rows import lane_reads, window_reads
from cacheloader.order.lane_steps import LaneSteps
from cacheloader.order.lanes import LaneCut, shard_order
from cacheloader.order.places import Accesses, LaneReads, Places
from cacheloader.order.windows import EpochWindows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cacheloader.order.options import OrderOptions

_KEPT_LAYOUTS = 4


class SampleOrder(LaneSteps):
    """A pure function from (epoch, row, global batch, rank) to samples; see docs/order.md.

    A step of global batch B that starts at row ``row`` takes the samples of rows ``[row, row + B / lanes)`` of every
    lane. What it remembers between calls (lane cuts, permuted shards) only saves time, so calls may come in any order
    and from several threads. A data set without samples has epochs without steps.

    Args:
        samples_per_shard: int64 [shards], each 0 or more; the manifest's ``num_samples``.
        options: What else the order depends on.

    Attributes:
        options: As given.

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
        super().__init__(num_samples=int(self._samples_per_shard.sum()), lanes=options.lanes, tail=options.tail)
        self.options = options
        self._cuts: dict[int, LaneCut] = {}
        self._layouts: dict[tuple[int, int, int], EpochWindows] = {}

    @property
    def filled_shards(self) -> NDArray[np.int32]:
        """int32 [n]; all shards with samples."""
        return np.flatnonzero(self._samples_per_shard).astype(np.int32)

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
        share = {"global_batch": global_batch, "rank": rank, "world_size": world_size}
        lane, lane_row, padded = self._step_places(epoch=epoch, row=row, **share)
        shard, sample = self._layout(epoch, *self.lanes_of(**share)).locate(lane, lane_row)
        return Places(shard=shard, sample=sample, lane=lane, row=lane_row, padded=padded)

    def batches(
        self, *, epoch: int, rows: Sequence[int], global_batch: int, rank: int, world_size: int
    ) -> tuple[Places, NDArray[np.int64]]:
        """What ``batch`` says of several steps of one epoch, for little more than the cost of one.

        Returns:
            The places of all of them, and int64 [steps + 1] where those of each step begin.
        """
        share = {"global_batch": global_batch, "rank": rank, "world_size": world_size}
        steps = [self._step_places(epoch=epoch, row=row, **share) for row in rows]
        lane, lane_row, padded = (np.concatenate(one) for one in zip(*steps, strict=True))
        shard, sample = self._layout(epoch, *self.lanes_of(**share)).locate(lane, lane_row)
        edges = np.cumsum([0, *(len(step[0]) for step in steps)])
        return Places(shard=shard, sample=sample, lane=lane, row=lane_row, padded=padded), edges

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
        shard, first_row, stop_row = window_reads(
            self._layout(epoch, *self._rank_lanes(first_place, stop_place, step_rows)),
            from_row=from_row,
            stop_row=from_row + steps * step_rows,
            step_rows=step_rows,
            first_place=first_place,
            stop_place=stop_place,
        )
        if self.tail == "pad" and steps:
            last_row = from_row + (steps - 1) * step_rows
            last = self.batch(epoch=epoch, row=last_row, global_batch=global_batch, rank=rank, world_size=world_size)
            added = np.unique(last.shard[last.padded])
            shard = np.concatenate((shard, added))
            first_row = np.append(first_row, np.full(len(added), last_row))
            stop_row = np.append(stop_row, np.full(len(added), self.rows_per_epoch))
        by_row = np.argsort(first_row, kind="stable")
        return Accesses(shard=shard[by_row], first_row=first_row[by_row], stop_row=stop_row[by_row])

    def locate(
        self, *, epoch: int, lane: NDArray[np.int64], row: NDArray[np.int64], first_lane: int, stop_lane: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The samples at single places of an epoch, for who counts lanes and rows himself.

        Args:
            epoch: 0 or more.
            lane: int64 [n], each in ``[first_lane, stop_lane)``.
            row: int64 [n], each inside its lane; see ``lane_lengths``.
            first_lane: The first lane that the caller reads, now and later.
            stop_lane: One past the last.

        Returns:
            Shard, int32 [n], and the sample's index inside it, int64 [n].
        """
        return self._layout(epoch, first_lane, stop_lane).locate(lane, row)

    def lane_reads(self, *, epoch: int, first_lane: int, stop_lane: int) -> LaneReads:
        """During which rows of an epoch who reads all of the lanes ``[first_lane, stop_lane)`` needs which shards."""
        return lane_reads(self._layout(epoch, first_lane, stop_lane))

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
