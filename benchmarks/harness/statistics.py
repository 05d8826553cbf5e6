"""Medians, spread and ratios of repeated runs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Repeats of one figure.

    Attributes:
        median: Half of the repeats are at most this.
        least: Smallest repeat.
        most: Largest repeat.
        repeats: How many there were.
    """

    median: float
    least: float
    most: float
    repeats: int

    @property
    def relative(self) -> float:
        """Width of the range as a fraction of the median; infinite where the median is 0 and the range is not."""
        width = self.most - self.least
        if not width:
            return 0.0
        return width / abs(self.median) if self.median else math.inf


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of 100 lie, between neighbours in proportion.

    Args:
        values: At least one, in any order.
        percent: 0 to 100.
    """
    if not values:
        raise ValueError("a percentile of no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent={percent} is not between 0 and 100")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    # Not low + (high - low) * f: that can leave [low, high] by rounding, and overflow.
    fraction = place - below
    return min(max(ordered[below] * (1 - fraction) + ordered[above] * fraction, ordered[below]), ordered[above])


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    return percentile(values, 50)


def spread(values: Sequence[float]) -> Spread:
    """Median and range of at least one value."""
    return Spread(median=median(values), least=min(values), most=max(values), repeats=len(values))


def pairwise_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Ratios within each round, then their median and range: what slows a whole round cancels out.

    Args:
        numerators: One value a round.
        denominators: One value a round, above 0, of the same rounds.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} rounds of one contestant and {len(denominators)} of the other")
    if any(value <= 0 for value in denominators):
        raise ValueError("a ratio to something that is not above 0")
    return spread([over / under for over, under in zip(numerators, denominators, strict=True)])
