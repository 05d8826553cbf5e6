"""During which rows a rank reads the shards of its windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cacheloader.order.places import LaneReads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cacheloader.order.windows import EpochWindows


def window_reads(
    layout: EpochWindows, *, from_row: int, stop_row: int, step_rows: int, first_place: int, stop_place: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """The shards that a rank reads in rows ``[from_row, stop_row)`` of one epoch.

    Args:
        layout: The rank's lanes.
        from_row: First row of a step.
        stop_row: One past the last step's rows; may lie behind the lanes' ends.
        step_rows: Rows of one step.
        first_place: The rank's first place in each step.
        stop_place: One past the rank's last place in each step.

    Returns:
        Shard, int32 [n], and the first row and one past the last row, int64 [n], that the rank reads of the shard's
        window; lane by lane.
    """
    lane, opens, closes = _windows(layout)
    # Of its first and its last lane a rank may read a part of each step only: rows [low, high).
    before_lane = (layout.first_lane + lane) * step_rows
    low = np.maximum(first_place - before_lane, 0)
    high = np.minimum(stop_place - before_lane, step_rows)
    first = from_row + _first_read(np.maximum(opens - from_row, 0), low, high, step_rows)
    stop = from_row + _stop_read(np.minimum(closes, stop_row) - from_row, low, high, step_rows)
    pieces = np.diff(layout.window_piece)
    is_read = np.repeat(first < stop, pieces)
    return layout.piece_shard[is_read], np.repeat(first, pieces)[is_read], np.repeat(stop, pieces)[is_read]


def lane_reads(layout: EpochWindows) -> LaneReads:
    """The shards of all windows of these lanes with the rows of their windows, lane by lane."""
    lane, opens, closes = _windows(layout)
    pieces = np.diff(layout.window_piece)
    return LaneReads(
        shard=layout.piece_shard,
        lane=np.repeat(layout.first_lane + lane, pieces),
        first_row=np.repeat(opens, pieces),
        stop_row=np.repeat(closes, pieces),
    )


def _windows(layout: EpochWindows) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Lane, counted from the first of these, first row and one past the last row of each window."""
    lane = np.searchsorted(layout.lane_start, layout.window_start[:-1], side="right") - 1
    opens = layout.window_start[:-1] - layout.lane_start[lane]
    closes = layout.window_start[1:] - layout.lane_start[lane]
    return lane, opens, closes


def _first_read(
    row: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64], step: int
) -> NDArray[np.int64]:
    """The first row from ``row`` on that lies in ``[low, high)`` of its step."""
    phase = row % step
    return row - phase + np.where(phase < high, np.maximum(phase, low), step + low)


def _stop_read(row: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """One past the last row before ``row`` that lies in ``[low, high)`` of its step."""
    phase = row % step
    return row - phase + np.where(phase > low, np.minimum(phase, high), high - step)
