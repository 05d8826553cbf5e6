"""A histogram of durations that is exact to 4.4 % at any scale and that can be added up over ranks and attempts.

Source: base-2 exponential histograms of https://opentelemetry.io/docs/specs/otel/metrics/data-model/
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

SCALE = 3
"""Eight buckets for each doubling: half of one is 4.4 % of a value."""

MAX_TOP = 16


@dataclass(slots=True)
class Durations:
    """Counts of positive durations in seconds, and the longest ones by name.

    Attributes:
        counts: Bucket ``i`` holds values in ``(2^(i/8), 2^((i+1)/8)]``; values of 0 lie in the lowest one that a float
            can name.
        top: The longest, as (step, seconds), longest first.
    """

    counts: Counter[int] = field(default_factory=Counter)
    top: list[tuple[int, float]] = field(default_factory=list)

    def add(self, seconds: float, step: int = -1) -> None:
        """Count one value."""
        self.counts[bucket(seconds)] += 1
        if len(self.top) < MAX_TOP or seconds > self.top[-1][1]:
            self.top = sorted([*self.top, (step, seconds)], key=lambda pair: (-pair[1], pair[0]))[:MAX_TOP]

    def merge(self, other: Durations) -> None:
        """Add what another one has counted."""
        self.counts.update(other.counts)
        self.top = sorted([*self.top, *other.top], key=lambda pair: (-pair[1], pair[0]))[:MAX_TOP]

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts.values())

    def quantile(self, share: float) -> float:
        """The value that ``share`` of all do not exceed, to 4.4 % and never above the longest; 0 of none."""
        longest = self.top[0][1] if self.top else math.inf
        left = math.ceil(share * self.count)
        for index, count in sorted(self.counts.items()):
            left -= count
            if left <= 0:
                return min(float(2 ** ((index + 0.5) / 2**SCALE)), longest)
        return 0.0


def bucket(seconds: float) -> int:
    """Number of the bucket of a value."""
    index: int = math.ceil(math.log2(max(seconds, 1e-12)) * 2**SCALE) - 1
    return index
