"""What the order answers with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """One rank's batch, in place order. All arrays have one entry a sample.

    Attributes:
        shard: int32 [n]; index in the manifest.
        sample: int64 [n]; index inside the shard.
        lane: int64 [n]; the lane the sample lies in.
        row: int64 [n]; the sample's row in its lane. (epoch, lane, row) names the sample's turn: a sample that was
            added to fill a step has the lane and row of its first reading.
        padded: bool [n]; whether the sample was added to fill the last step of the epoch.
    """

    shard: NDArray[np.int32]
    sample: NDArray[np.int64]
    lane: NDArray[np.int64]
    row: NDArray[np.int64]
    padded: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.shard)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Accesses:
    """Which shards a rank reads in the rest of an epoch, and when: access ``a`` is ``[first_row[a], stop_row[a])``.

    A shard has one access for each lane in which the rank reads it, which lasts as long as its window, and one more if
    samples of it fill the last step.

    Attributes:
        shard: int32 [n]; index in the manifest.
        first_row: int64 [n], sorted.
        stop_row: int64 [n]; at most ``rows_per_epoch``.
    """

    shard: NDArray[np.int32]
    first_row: NDArray[np.int64]
    stop_row: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.shard)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneReads:
    """Which shards whole lanes need in an epoch, and when: ``[first_row, stop_row)`` of the lane, window by window.

    Attributes:
        shard: int32 [n]; index in the manifest.
        lane: int64 [n].
        first_row: int64 [n].
        stop_row: int64 [n].
    """

    shard: NDArray[np.int32]
    lane: NDArray[np.int64]
    first_row: NDArray[np.int64]
    stop_row: NDArray[np.int64]
