"""How many samples of each source a lane of a mixture holds: exact shares by cumulative rounding, block by block."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

BLOCK_ROWS = 4096
"""Rows of a block. Part of the order: see MIXTURE_VERSION."""

MIXTURE_VERSION = 1
"""Raised whenever equal options would give another order; belongs into every saved position."""

_LOG_CHANCE = 28.0  # of e: below 1e-12
_ROUNDING = 0.01  # samples; far above what floats lose


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Weights that hold from one block on.

    Attributes:
        start_block: The first block; the first phase has 0.
        weights: One for each source, each 0 or ``1 / BLOCK_ROWS`` and more, together 1.
    """

    start_block: int
    weights: tuple[Fraction, ...]


class Shares:
    """Counts samples through the blocks of a lane; all lanes have the same counts.

    After any number of blocks of a phase each source has got its exact share of them, rounded down or up: the largest
    remainders are rounded up, so that each block is full. A weight of ``1 / BLOCK_ROWS`` and more makes sure that a
    remainder that is rounded up once and down later never takes back a sample.

    Args:
        phases: In order of their blocks.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = tuple(phases)
        self._starts = [phase.start_block for phase in phases]
        self._parts = [_parts(phase.weights) for phase in phases]
        self._bases = [(0,) * self.num_sources]
        for number, stop_block in enumerate(self._starts[1:]):
            self._bases.append(self._before(number, stop_block))

    @property
    def num_sources(self) -> int:
        """Number of sources."""
        return len(self.phases[0].weights)

    def before(self, block: int) -> tuple[int, ...]:
        """Samples of each source in a lane's blocks ``[0, block)``. The cost does not depend on the block.

        Args:
            block: 0 or more.
        """
        return self._before(bisect_right(self._starts, block) - 1, block)

    def surround(
        self, source: int, turn: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Between which rows certain samples of a source lie, without a look at any block.

        The blocks are certain. Inside a block, where the pattern is as good as random, a sample may be expected near
        the place that it would have if the pattern were even; Bernstein's inequality gives the distance which it keeps
        within but for a chance of 1e-12. So this is for plans, which may be wrong and only cost time.

        Args:
            source: Number of the source.
            turn: int64 [n]; each sample's number among those of the source in a lane, below ``before`` some block.

        Returns:
            First row, int64 [n], and one past the last row, int64 [n], that may hold it, then the row, float64 [n],
            near which it lies.
        """
        bases = np.array([base[source] for base in self._bases], dtype=np.int64)
        # Where a source pauses for a phase, that phase and the next have the same base, and the last of them is meant.
        phase = np.searchsorted(bases, turn, side="right") - 1
        weight = np.array([float(phase.weights[source]) for phase in self.phases])[phase]
        start = np.array(self._starts, dtype=np.int64)[phase] * BLOCK_ROWS
        stop = np.append(np.array(self._starts[1:], dtype=np.int64) * BLOCK_ROWS, np.iinfo(np.int64).max)[phase]
        inside = (turn - bases[phase]).astype(np.float64)
        # Counts before a block differ from the exact share by less than one.
        first_block = np.floor(np.maximum(inside - _ROUNDING, 0) / weight / BLOCK_ROWS)
        last_block = np.floor((inside + 1 + _ROUNDING) / weight / BLOCK_ROWS)
        variance = BLOCK_ROWS / 4 * weight * (1 - weight)
        distance = (2 + _LOG_CHANCE / 3 + np.sqrt(_LOG_CHANCE**2 / 9 + 2 * _LOG_CHANCE * variance)) / weight
        near = inside / weight
        first_row = np.maximum(first_block * BLOCK_ROWS, np.floor(near - distance)).astype(np.int64)
        stop_row = np.minimum((last_block + 1) * BLOCK_ROWS, np.ceil(near + distance) + 1).astype(np.int64)
        return start + first_row, np.minimum(start + stop_row, stop), start + near

    def _before(self, phase: int, block: int) -> tuple[int, ...]:
        parts, whole = self._parts[phase]
        places = (block - self._starts[phase]) * BLOCK_ROWS
        counts = [divmod(places * part, whole) for part in parts]
        missing = places - sum(quotient for quotient, _ in counts)
        # Of equal remainders the first source's is rounded up.
        raised = set(sorted(range(len(counts)), key=lambda source: -counts[source][1])[:missing])
        base = self._bases[phase]
        return tuple(base[source] + counts[source][0] + (source in raised) for source in range(len(counts)))


def _parts(weights: tuple[Fraction, ...]) -> tuple[tuple[int, ...], int]:
    whole = lcm(*(weight.denominator for weight in weights))
    return tuple(int(weight * whole) for weight in weights), whole
