"""Many small reads to few larger ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GAP_BYTES = 16 << 10
"""Bytes worth reading in vain to save one call."""

LIMIT_BYTES = 1 << 20
"""Length at which a merged read is cut, so that a batch never holds much more than its samples."""

ALONE_BYTES = 16 << 10
"""From this length on, the copy out of a merged read costs more than a call of its own (three times, at 32 kB)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reads:
    """What to read, and where in it the ranges that were asked for lie.

    Attributes:
        start: int64 [k], ascending; first byte of each read.
        stop: int64 [k]; one past its last byte.
        read: int64 [n]; which read holds range i.
        offset: int64 [n]; where in that read range i starts.
    """

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    read: NDArray[np.int64]
    offset: NDArray[np.int64]


def coalesce(
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    *,
    gap_bytes: int = GAP_BYTES,
    limit_bytes: int = LIMIT_BYTES,
    alone_bytes: int = ALONE_BYTES,
) -> Reads:
    """Merge ranges that lie close together.

    Args:
        start: int64 [n] in any order; ranges may repeat and overlap.
        stop: int64 [n], at least ``start``.
        gap_bytes: Ranges at most this far apart become one read.
        limit_bytes: Ranges merge only with those that start less than this behind the first of their read.
        alone_bytes: Ranges of this length or more are read by themselves.

    Returns:
        Reads that hold every range whole.
    """
    if not len(start):
        nothing = np.empty(0, dtype=np.int64)
        return Reads(start=nothing, stop=nothing, read=nothing, offset=nothing)
    order = np.argsort(start, kind="stable")
    first, last = start[order], stop[order]
    reach = np.maximum.accumulate(last)
    alone = last - first >= alone_bytes
    opens = alone.copy()
    opens[0] = True
    opens[1:] |= alone[:-1]
    opens[1:] |= first[1:] - reach[:-1] > gap_bytes
    run_first = first[opens][np.cumsum(opens) - 1]
    part = (first - run_first) // limit_bytes
    opens[1:] |= part[1:] != part[:-1]

    heads = np.flatnonzero(opens)
    read = np.empty(len(order), dtype=np.int64)
    read[order] = np.cumsum(opens) - 1
    read_start = first[heads]
    return Reads(
        start=read_start,
        stop=np.maximum.reduceat(last, heads),
        read=read,
        offset=start - read_start[read],
    )
