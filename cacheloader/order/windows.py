"""One epoch of some neighbouring lanes: their pieces permuted, and the windows in which samples are mixed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from cacheloader.order.distinct import ranked
from cacheloader.order.permutation import SORTED_SIZE, large_permutation, raw_words, small_permutation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cacheloader.order.lanes import LaneCut
    from cacheloader.order.options import OrderOptions

_SPARE_PERMUTATIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochWindows:
    """The samples of lanes ``[first_lane, first_lane + lanes)`` in the order of one epoch.

    A *place* counts samples through these lanes, one lane behind the other. Holds a few numbers for each piece and
    none for each sample.

    Attributes:
        first_lane: The lane of place 0.
        lane_start: int64 [lanes + 1]; first place of each lane.
        piece_start: int64 [pieces + 1]; first place of each piece before samples are mixed.
        piece_shard: int32 [pieces].
        piece_sample: int64 [pieces]; index, inside the shard, of the piece's first sample.
        window_piece: int64 [windows + 1]; first piece of each window.
        window_start: int64 [windows + 1]; first place of each window.
        window_key: uint64 [windows]; names the permutation of its samples.
        mixed: Whether samples are mixed at all.
    """

    first_lane: int
    lane_start: NDArray[np.int64]
    piece_start: NDArray[np.int64]
    piece_shard: NDArray[np.int32]
    piece_sample: NDArray[np.int64]
    window_piece: NDArray[np.int64]
    window_start: NDArray[np.int64]
    window_key: NDArray[np.uint64]
    mixed: bool
    _permutations: dict[int, NDArray[np.uint16]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, cut: LaneCut, *, options: OrderOptions, epoch: int, first_lane: int, stop_lane: int) -> Self:
        """The epoch's order of lanes ``[first_lane, stop_lane)``. A lane's order does not depend on the others.

        Args:
            cut: All lanes.
            options: The order's options.
            epoch: 0 or more.
            first_lane: 0 or more.
            stop_lane: Above ``first_lane``.
        """
        first_piece, stop_piece = int(cut.lane_piece[first_lane]), int(cut.lane_piece[stop_lane])
        count = stop_piece - first_piece
        lane_piece = cut.lane_piece[first_lane : stop_lane + 1] - first_piece
        pieces_of_lane = np.diff(lane_piece)
        lane = np.repeat(np.arange(len(pieces_of_lane)), pieces_of_lane)
        order = np.arange(first_piece, stop_piece)
        key = np.zeros(count, dtype=np.uint64)
        if options.shuffle:
            words = raw_words("pieces", options.seed, epoch, start=first_piece, count=count)
            order = first_piece + np.lexsort((words, lane))
            key = raw_words("windows", options.seed, epoch, start=first_piece, count=count)
        size = cut.piece_start[order + 1] - cut.piece_start[order]
        piece_start = np.concatenate(([0], np.cumsum(size)))
        number_in_lane = np.arange(count) - lane_piece[lane]
        opens_window = (
            _window_opener(number_in_lane, options.shuffle_window if options.shuffle else 1) == number_in_lane
        )
        window_piece = np.append(np.flatnonzero(opens_window), count)
        return cls(
            first_lane=first_lane,
            lane_start=cut.lane_start[first_lane : stop_lane + 1] - cut.lane_start[first_lane],
            piece_start=piece_start,
            piece_shard=cut.piece_shard[order],
            piece_sample=cut.piece_sample[order],
            window_piece=window_piece,
            window_start=piece_start[window_piece],
            window_key=key[window_piece[:-1]],
            mixed=options.shuffle,
        )

    def locate(self, lane: NDArray[np.int64], row: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The samples at these rows of these lanes.

        Args:
            lane: int64 [n], each one of these lanes.
            row: int64 [n], each inside its lane.

        Returns:
            Shard, int32 [n], and the sample's index inside it, int64 [n].
        """
        place = self.lane_start[lane - self.first_lane] + row
        if self.mixed and len(place):
            place = self._mix(place)
        piece = np.searchsorted(self.piece_start, place, side="right") - 1
        return self.piece_shard[piece], self.piece_sample[piece] + (place - self.piece_start[piece])

    def _mix(self, place: NDArray[np.int64]) -> NDArray[np.int64]:
        windows, which = ranked(np.searchsorted(self.window_start, place, side="right") - 1)
        start = self.window_start[windows]
        size = self.window_start[windows + 1] - start
        inside = place - start[which]
        is_large = size > SORTED_SIZE
        if is_large.all():
            mixed = large_permutation(inside, window=which, size=size, key=self.window_key[windows])
        else:
            mixed = np.empty_like(inside)
            at_large = np.flatnonzero(is_large[which])
            mixed[at_large] = large_permutation(
                inside[at_large], window=which[at_large], size=size, key=self.window_key[windows]
            )
            at_small = np.flatnonzero(~is_large[which])
            mixed[at_small] = self._sorted(inside[at_small], windows=windows, which=which[at_small], size=size)
        return start[which] + mixed

    def _sorted(
        self,
        inside: NDArray[np.int64],
        *,
        windows: NDArray[np.int64],
        which: NDArray[np.int64],
        size: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        # All permutations one behind the other, then one look-up for all places.
        used, rank = ranked(which)
        permutations = [self._permutation(int(windows[at]), int(size[at])) for at in used]
        offset = np.concatenate(([0], np.cumsum([len(permutation) for permutation in permutations])))
        return np.concatenate(permutations)[offset[rank] + inside].astype(np.int64)

    def _permutation(self, window: int, size: int) -> NDArray[np.uint16]:
        permutation = self._permutations.get(window)
        if permutation is None:
            permutation = small_permutation(self.window_key[window], size)
            # Each lane reads one window, for a moment two. At worst 2 KiB for each of them.
            if len(self._permutations) >= 2 * len(self.lane_start) + _SPARE_PERMUTATIONS:
                self._permutations.clear()
            self._permutations[window] = permutation
        return permutation


def _window_opener(number: NDArray[np.int64], largest: int) -> NDArray[np.int64]:
    """The first piece of the window that a lane's piece of this number lies in.

    Windows hold 1, 2, 4 ... pieces while that is below ``largest``, and ``largest`` from then on.
    """
    growing = np.array([2**power - 1 for power in range((largest - 1).bit_length())], dtype=np.int64)
    full = 2 ** len(growing) - 1
    opener: NDArray[np.int64] = full + (number - full) // largest * largest
    is_early = number < full
    opener[is_early] = growing[np.searchsorted(growing, number[is_early], side="right") - 1]
    return opener
