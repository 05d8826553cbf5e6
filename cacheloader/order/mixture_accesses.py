"""During which rows of a mixture a rank reads the shards of one source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cacheloader.order.mixture_shares import BLOCK_ROWS
from cacheloader.order.places import Accesses

if TYPE_CHECKING:
    from cacheloader.order.mixture_shares import Shares
    from cacheloader.order.sample_order import SampleOrder

MOST_EPOCHS = 1000
"""A source that is read more often than this is needed all the time: its lanes are that short beside what lies ahead.
Each epoch costs about 0.2 ms here."""


def source_accesses(
    shares: Shares,
    source: int,
    order: SampleOrder,
    *,
    from_row: int,
    stop_row: int,
    first_lane: int,
    stop_lane: int,
) -> Accesses:
    """The shards of a source that some lanes need in rows ``[from_row, stop_row)`` of the mixture.

    Every row that reads a shard lies in an access of that shard, as far as ``Shares.surround`` holds. Accesses last a
    little longer than the readings of their windows.

    Args:
        shares: Those of the mixture.
        source: Number of the source.
        order: The source's own order.
        from_row: Counted from the beginning of the run.
        stop_row: Above ``from_row``.
        first_lane: The first lane that the rank reads.
        stop_lane: One past the last.
    """
    first_turn = shares.before(from_row // BLOCK_ROWS)[source]
    stop_turn = shares.before(-(-stop_row // BLOCK_ROWS))[source]
    lengths = order.lane_lengths(first_lane, stop_lane)
    epochs = range(first_turn // int(lengths.max()), -(-stop_turn // int(lengths.min())))
    if len(epochs) > MOST_EPOCHS:
        return _always(order, from_row=from_row, stop_row=stop_row, first_lane=first_lane, stop_lane=stop_lane)
    shard, first, stop = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for epoch in epochs:
        reads = order.lane_reads(epoch=epoch, first_lane=first_lane, stop_lane=stop_lane)
        passed = epoch * lengths[reads.lane - first_lane]
        opens = np.maximum(passed + reads.first_row, first_turn)
        closes = np.minimum(passed + reads.stop_row, stop_turn)
        at = np.flatnonzero(opens < closes)
        shard.append(reads.shard[at])
        first.append(opens[at])
        stop.append(closes[at])
    first_row, _, near = shares.surround(source, np.concatenate(first))
    _, end_row, _ = shares.surround(source, np.concatenate(stop) - 1)
    first_row, end_row = np.maximum(first_row, from_row), np.minimum(end_row, stop_row)
    is_read = np.flatnonzero(first_row < end_row)
    # Many begin at once with the rows given; what is needed first comes first.
    at = is_read[np.lexsort((near[is_read], first_row[is_read]))]
    return Accesses(shard=np.concatenate(shard)[at], first_row=first_row[at], stop_row=end_row[at])


def _always(order: SampleOrder, *, from_row: int, stop_row: int, first_lane: int, stop_lane: int) -> Accesses:
    if order.options.redeal:
        shard = order.filled_shards
    else:
        shard = np.unique(order.lane_reads(epoch=0, first_lane=first_lane, stop_lane=stop_lane).shard)
    return Accesses(
        shard=shard,
        first_row=np.full(len(shard), from_row, dtype=np.int64),
        stop_row=np.full(len(shard), stop_row, dtype=np.int64),
    )
