"""Lanes: the data set's samples, laid end to end in a seeded order of shards and cut into equal parts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Self

import numpy as np

from cacheloader.order.permutation import raw_words, sorting_permutation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cacheloader.order.options import OrderOptions

FINEST_REDEAL = 100
"""``redeal`` is rounded to a fraction with at most this denominator."""

SHARDS_PER_GROUP = 8
"""A group of shards that is dealt anew together has about this many members or more, or dealing would move nothing."""


def shard_order(num_shards: int, *, options: OrderOptions, epoch: int) -> NDArray[np.int64]:
    """The order in which shards are laid end to end before the cut.

    It depends on the seed alone. With ``redeal`` the shards' places are divided into groups for good, and each epoch
    permutes the next few groups in turn, each within its own places: so an epoch moves that fraction of the shards and
    no others, and any epoch is had without those before it.

    Args:
        num_shards: How many shards there are.
        options: The order's options.
        epoch: 0 or more; matters for ``redeal`` only.

    Returns:
        int64 [num_shards].
    """
    if not options.shuffle:
        return np.arange(num_shards, dtype=np.int64)
    order = sorting_permutation(raw_words("shards", options.seed, count=num_shards))
    if options.redeal and epoch:
        finest = max(1, min(FINEST_REDEAL, num_shards // SHARDS_PER_GROUP))
        share = max(Fraction(options.redeal).limit_denominator(finest), Fraction(1, finest))
        dealt, groups = share.numerator, share.denominator
        places = sorting_permutation(raw_words("groups", options.seed, count=num_shards))
        for group in range(groups):
            # Epochs 1, 2, ... deal groups [0, dealt), [dealt, 2 * dealt), ... around the circle.
            times = (epoch * dealt - 1 - group) // groups + 1
            if times > 0:
                own = np.sort(places[group::groups])
                words = raw_words("redeal", options.seed, group, times, count=len(own))
                order[own] = order[own][sorting_permutation(words)]
    return order


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneCut:
    """Which part of which shard lies in which lane. A *piece* is a shard's samples inside one lane.

    Of N = q * L + r samples the first r lanes hold q + 1 and the others q. Shards without samples have no piece.

    Attributes:
        lane_start: int64 [lanes + 1]; place of each lane's first sample when all are laid end to end.
        lane_piece: int64 [lanes + 1]; number of each lane's first piece.
        piece_start: int64 [pieces + 1]; place of each piece's first sample.
        piece_shard: int32 [pieces].
        piece_sample: int64 [pieces]; index, inside the shard, of the piece's first sample.
    """

    lane_start: NDArray[np.int64]
    lane_piece: NDArray[np.int64]
    piece_start: NDArray[np.int64]
    piece_shard: NDArray[np.int32]
    piece_sample: NDArray[np.int64]

    @classmethod
    def of(cls, samples_per_shard: NDArray[np.int64], order: NDArray[np.int64], *, lanes: int) -> Self:
        """The cut of the shards, taken in this order, into ``lanes`` lanes.

        Args:
            samples_per_shard: int64 [shards], each 0 or more.
            order: int64 [shards]; a permutation.
            lanes: 1 or more.
        """
        shard_samples = samples_per_shard[order]
        shard_stop = np.cumsum(shard_samples)
        total = int(shard_samples.sum())
        lane = np.arange(lanes + 1, dtype=np.int64)
        lane_start = lane * (total // lanes) + np.minimum(lane, total % lanes)
        # Two sorted runs, which the stable sort merges in one pass; np.unique may hash and takes 100 times as long.
        borders = np.sort(np.concatenate((lane_start, shard_stop)), kind="stable")
        piece_start = borders[np.append(True, borders[1:] != borders[:-1])]
        at = np.searchsorted(shard_stop, piece_start[:-1], side="right")
        return cls(
            lane_start=lane_start,
            lane_piece=np.searchsorted(piece_start, lane_start).astype(np.int64, copy=False),
            piece_start=piece_start,
            piece_shard=order[at].astype(np.int32),
            piece_sample=piece_start[:-1] - (shard_stop[at] - shard_samples[at]),
        )
