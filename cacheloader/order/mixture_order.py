"""The order of a mixture: which source's next sample lies at which place, from any position on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.errors import ConfigError
from cacheloader.order.lane_steps import LaneSteps
from cacheloader.order.mixture_pattern import BlockPattern
from cacheloader.order.mixture_shares import BLOCK_ROWS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cacheloader.order.mixture_shares import Shares

MIXTURE_TAILS = ("carry", "keep")

_SPARE_PATTERNS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixturePlaces:
    """One rank's batch of a mixture, in place order. All arrays have one entry a sample.

    Attributes:
        source: int64 [n]; number of the source.
        turn: int64 [n]; which of the source's samples in this lane, counted from the beginning of the run.
        lane: int64 [n].
        row: int64 [n]; row of the lane, counted from the beginning of the run.
    """

    source: NDArray[np.int64]
    turn: NDArray[np.int64]
    lane: NDArray[np.int64]
    row: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source)


class MixtureOrder(LaneSteps):
    """A pure function from (epoch, row, global batch, rank) to places of sources; see docs/order.md.

    A lane never ends: epochs are stretches of ``epoch_rows`` rows of it. What is remembered between calls (patterns of
    blocks) only saves time.

    Args:
        shares: How many samples each source has in each block.
        seed: Decides the patterns, ``[0, 2**64)``.
        lanes: 1 or more.
        epoch_rows: 1 or more.
        tail: ``"carry"`` lets a step that does not fit into the epoch take the first rows of the next, which then
            starts behind them; ``"keep"`` makes it smaller. Neither loses a sample.

    Raises:
        ConfigError: An option is out of its range.
    """

    def __init__(self, shares: Shares, *, seed: int, lanes: int, epoch_rows: int, tail: str = "carry") -> None:
        if tail not in MIXTURE_TAILS:
            raise ConfigError(
                f'tail={tail!r} does not fit a mixture, whose sources go on from epoch to epoch; pass "carry" for a '
                'last step that goes on, too, or "keep" for a smaller one'
            )
        super().__init__(num_samples=epoch_rows * lanes, lanes=lanes, tail=tail)
        self.shares = shares
        self.seed = seed
        self._patterns: dict[tuple[int, int], BlockPattern] = {}

    def batch(self, *, epoch: int, row: int, global_batch: int, rank: int, world_size: int) -> MixturePlaces:
        """One rank's places of the step that starts at ``row``; arguments and errors as in ``SampleOrder.batch``."""
        lane, lane_row, _ = self._step_places(
            epoch=epoch, row=row, global_batch=global_batch, rank=rank, world_size=world_size
        )
        lane_row += epoch * self.rows_per_epoch
        source, turn = self.locate(lane, lane_row)
        return MixturePlaces(source=source, turn=turn, lane=lane, row=lane_row)

    def locate(self, lane: NDArray[np.int64], row: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and turn at single places.

        Args:
            lane: int64 [n]; quickest where equal lanes stand together, by row.
            row: int64 [n]; counted from the beginning of the run.
        """
        block = row // BLOCK_ROWS
        source, turn = np.empty_like(row), np.empty_like(row)
        edges = np.flatnonzero((np.diff(lane) != 0) | (np.diff(block) != 0)) + 1
        before = {at: np.array(self.shares.before(at)) for at in np.unique(block).tolist()}
        for first, stop in pairwise([0, *edges.tolist(), len(row)] if len(row) else []):
            at = int(block[first])
            pattern = self.pattern(int(lane[first]), at)
            inside = row[first:stop] - at * BLOCK_ROWS
            source[first:stop] = pattern.source[inside]
            turn[first:stop] = pattern.turn[inside] + before[at][source[first:stop]]
        return source, turn

    def pattern(self, lane: int, block: int) -> BlockPattern:
        """The pattern of a block of a lane."""
        pattern = self._patterns.get((lane, block))
        if pattern is None:
            before, behind = self.shares.before(block), self.shares.before(block + 1)
            counts = [stop - start for start, stop in zip(before, behind, strict=True)]
            pattern = BlockPattern.of(counts, seed=self.seed, lane=lane, block=block)
            # Each lane reads one block, for a moment two; 16 KiB each.
            if len(self._patterns) >= 2 * self.lanes + _SPARE_PATTERNS:
                self._patterns.clear()
            self._patterns[lane, block] = pattern
        return pattern
