"""In which places of a block of a lane the sources of a mixture lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from cacheloader.order.mixture_shares import BLOCK_ROWS
from cacheloader.order.permutation import raw_words, sorting_permutation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockPattern:
    """One block of one lane.

    Attributes:
        source: int16 [BLOCK_ROWS]; the source of each place.
        turn: int16 [BLOCK_ROWS]; how many places of the block before it have the same source.
    """

    source: NDArray[np.int16]
    turn: NDArray[np.int16]

    @classmethod
    def of(cls, counts: Sequence[int], *, seed: int, lane: int, block: int) -> Self:
        """Each order of the sources' samples is equally likely, and lanes and blocks have orders of their own.

        Args:
            counts: Places of each source, together BLOCK_ROWS.
            seed: The mixture's seed.
            lane: 0 or more.
            block: 0 or more.
        """
        by_source = np.repeat(np.arange(len(counts), dtype=np.int16), counts)
        words = raw_words("mixture", seed, lane, block, count=BLOCK_ROWS)
        source = by_source[sorting_permutation(words)]
        turn = np.empty(BLOCK_ROWS, dtype=np.int16)
        turn[np.argsort(source, kind="stable")] = np.concatenate([np.arange(count) for count in counts])
        return cls(source=source, turn=turn)
