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

    def table(self, first_block: int, stop_block: int) -> NDArray[np.int64]:
        """Int64 [stop_block - first_block + 1, sources]: ``before`` each of these blocks and behind the last."""
        blocks = range(first_block, stop_block + 1)
        return np.array([self.before(block) for block in blocks], dtype=np.int64).reshape(-1, self.num_sources)

    def surround(
        self, source: int, turn: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Which blocks may hold certain samples of a source, without counting through any block.

        Args:
            source: Number of the source.
            turn: int64 [n]; each sample's number among those of the source in a lane.

        Returns:
            The first block, int64 [n], and one past the last, int64 [n], that may hold it: one or two blocks, and four
            where the source has but a few samples in each. Then the row, float64 [n], near which it lies.
        """
        bases = np.array([base[source] for base in self._bases], dtype=np.int64)
        # Where a source pauses for a phase, that phase and the next have the same base, and the last of them is meant.
        phase = np.searchsorted(bases, turn, side="right") - 1
        starts = np.array(self._starts, dtype=np.int64)
        shares = np.array([float(phase.weights[source]) * BLOCK_ROWS for phase in self.phases])[phase]
        inside = (turn - bases[phase]).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            # Counts differ from the exact share by less than one; a hundredth is for the float's own rounding.
            first = np.floor(np.maximum(inside - 0.01, 0) / shares)
            stop = np.floor((inside + 1.01) / shares) + 1
            near = (starts[phase] + inside / shares) * BLOCK_ROWS
        length = np.append(np.diff(starts), np.iinfo(np.int64).max)[phase].astype(np.float64)
        first, stop = np.minimum(first, length - 1), np.minimum(stop, length)
        return starts[phase] + first.astype(np.int64), starts[phase] + stop.astype(np.int64), near

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
