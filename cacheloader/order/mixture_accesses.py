"""During which rows of a mixture a rank reads the shards of one source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.order.mixture_shares import BLOCK_ROWS
from cacheloader.order.places import Accesses

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cacheloader.order.mixture_order import MixtureOrder
    from cacheloader.order.mixture_pattern import BlockPattern
    from cacheloader.order.sample_order import SampleOrder

EXACT_PATTERNS = 128
"""Patterns of blocks that are laid out to find exact rows: about 50 ms. Rows further off are those of whole blocks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reads:
    """Like ``LaneReads``, but turns, which run on from epoch to epoch of the source."""

    shard: NDArray[np.int32]
    lane: NDArray[np.int64]
    first: NDArray[np.int64]
    stop: NDArray[np.int64]


class MixtureRows:
    """The rows ``[from_row, stop_row)`` of some lanes of a mixture, asked for the accesses of its sources.

    Args:
        order: The mixture.
        from_row: Counted from the beginning of the run.
        stop_row: Above ``from_row``.
        first_lane: The first lane that the rank reads.
        stop_lane: One past the last.
        exact_patterns: How many patterns of blocks may be laid out, beside the first block's.
    """

    def __init__(
        self,
        order: MixtureOrder,
        *,
        from_row: int,
        stop_row: int,
        first_lane: int,
        stop_lane: int,
        exact_patterns: int = EXACT_PATTERNS,
    ) -> None:
        self._order = order
        self._from_row = from_row
        self._stop_row = stop_row
        self._lanes = range(first_lane, stop_lane)
        self._first_block, stop_block = from_row // BLOCK_ROWS, -(-stop_row // BLOCK_ROWS)
        exact_blocks = min(max(1, exact_patterns // len(self._lanes)), stop_block - self._first_block)
        self._exact = order.shares.table(self._first_block, self._first_block + exact_blocks)
        self._stop_turn = order.shares.before(stop_block)
        self._num_blocks = stop_block - self._first_block
        self._patterns: dict[tuple[int, int], BlockPattern] = {}

    def accesses(self, source: int, order: SampleOrder) -> Accesses:
        """The shards of one source that these lanes need, with rows of the mixture.

        Every row that reads a shard lies in an access of that shard. Accesses are as in ``SampleOrder.accesses``; those
        that are far off begin and end with blocks.

        Args:
            source: Number of the source.
            order: The source's own order.
        """
        reads = self._reads(source, order)
        if reads is None:  # passes over its lanes within blocks: every shard is needed all the time
            lanes = order.lane_reads(epoch=0, first_lane=self._lanes.start, stop_lane=self._lanes.stop)
            shard = order.filled_shards if order.options.redeal else np.unique(lanes.shard)
            return Accesses(
                shard=shard,
                first_row=np.full(len(shard), self._from_row),
                stop_row=np.full(len(shard), self._stop_row),
            )
        first_row, _, near = self._rows(source, reads.lane, reads.first)
        _, stop_row, _ = self._rows(source, reads.lane, reads.stop - 1)
        first_row, stop_row = np.maximum(first_row, self._from_row), np.minimum(stop_row, self._stop_row)
        is_read = np.flatnonzero(first_row < stop_row)
        by_row = is_read[np.lexsort((near[is_read], first_row[is_read]))]
        return Accesses(shard=reads.shard[by_row], first_row=first_row[by_row], stop_row=stop_row[by_row])

    def _reads(self, source: int, order: SampleOrder) -> _Reads | None:
        lengths = order.lane_lengths(self._lanes.start, self._lanes.stop)
        first_turn, stop_turn = int(self._exact[0, source]), self._stop_turn[source]
        if stop_turn - first_turn > self._num_blocks * int(lengths.min()):
            return None
        parts = []
        for epoch in range(first_turn // int(lengths.max()), -(-stop_turn // int(lengths.min()))):
            reads = order.lane_reads(epoch=epoch, first_lane=self._lanes.start, stop_lane=self._lanes.stop)
            passed = epoch * lengths[reads.lane - self._lanes.start]
            first = np.maximum(passed + reads.first_row, first_turn)
            stop = np.minimum(passed + reads.stop_row, stop_turn)
            at = np.flatnonzero(first < stop)
            parts.append(_Reads(shard=reads.shard[at], lane=reads.lane[at], first=first[at], stop=stop[at]))
        return _Reads(
            shard=np.concatenate([np.empty(0, dtype=np.int32), *(part.shard for part in parts)]),
            lane=_joined([part.lane for part in parts]),
            first=_joined([part.first for part in parts]),
            stop=_joined([part.stop for part in parts]),
        )

    def _rows(
        self, source: int, lane: NDArray[np.int64], turn: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """First row, one past the last row and the likely row of samples of a source."""
        first_block, stop_block, near = self._order.shares.surround(source, turn)
        first, stop = first_block * BLOCK_ROWS, stop_block * BLOCK_ROWS
        before = self._exact[:, source]
        exact = np.flatnonzero(turn < before[-1])
        block = np.searchsorted(before, turn[exact], side="right") - 1
        for number in range(len(before) - 1):
            of_block = exact[block == number]
            for at_lane in np.unique(lane[of_block]).tolist():
                at = of_block[lane[of_block] == at_lane]
                places = self._pattern(at_lane, self._first_block + number).places(source)
                first[at] = (self._first_block + number) * BLOCK_ROWS + places[turn[at] - before[number]]
                stop[at] = first[at] + 1
        near[exact] = first[exact]
        return first, stop, near

    def _pattern(self, lane: int, block: int) -> BlockPattern:
        # All sources ask for the same ones, and they may be more than the order keeps.
        pattern = self._patterns.get((lane, block))
        if pattern is None:
            pattern = self._patterns[lane, block] = self._order.pattern(lane, block)
        return pattern


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
