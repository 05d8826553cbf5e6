"""The weights of a mixture as the user writes them, and what becomes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError
from cacheloader.order.mixture_shares import BLOCK_ROWS, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFrom:
    """Other weights from some point of a run on. They take effect at the next block of 4,096 rows.

    Attributes:
        weights: Of every source, by name; 0 pauses one. Only their ratios matter.
        samples: The point, as samples that all ranks together have read since the run began; 1 or more.
        rows: The same as rows, of which each holds one sample of every lane. Give one of the two.

    Raises:
        ConfigError: None or both of ``samples`` and ``rows`` are given, or it is below 1.
    """

    weights: Mapping[str, float]
    samples: int | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.samples, self.rows) if value is not None]
        if len(given) != 1 or not isinstance(given[0], int) or isinstance(given[0], bool) or given[0] < 1:
            raise ConfigError(
                f"WeightsFrom(samples={self.samples!r}, rows={self.rows!r}) needs one of the two, a whole number from "
                "1; weights from the start on stand beside the sources"
            )

    def start_block(self, lanes: int) -> int:
        """The first block of the new weights."""
        rows = self.rows if self.rows is not None else -(-(self.samples or 0) // lanes)
        return -(-rows // BLOCK_ROWS)


def phases_of(
    weights: Mapping[str, float], schedule: Sequence[WeightsFrom], *, names: Sequence[str], lanes: int
) -> tuple[Phase, ...]:
    """The phases of a mixture.

    Args:
        weights: Those at the start, by name.
        schedule: Changes, in any order.
        names: The sources, in the order in which they are counted.
        lanes: 1 or more.

    Raises:
        ConfigError: Weights cannot work, or two changes fall into one block.
    """
    phases = [Phase(start_block=0, weights=normalised(weights, names=names))]
    for change in sorted(schedule, key=lambda change: change.start_block(lanes)):
        block = change.start_block(lanes)
        if block == phases[-1].start_block:
            raise ConfigError(
                f"two changes of weights take effect at row {block * BLOCK_ROWS}, the next block of {BLOCK_ROWS} rows "
                f"of {lanes} samples; leave one of them out"
            )
        phases.append(Phase(start_block=block, weights=normalised(change.weights, names=names)))
    return tuple(phases)


def normalised(weights: Mapping[str, float], *, names: Sequence[str]) -> tuple[Fraction, ...]:
    """Weights as exact fractions that sum to one, in the order of ``names``.

    A float is taken as the decimal number that it is written as: 0.7 and 0.3 are 7/10 and 3/10.

    Raises:
        ConfigError: A name is missing or unknown, or a weight is no number, is negative or too small.
    """
    if set(weights) != set(names):
        raise ConfigError(f"weights are given for {sorted(weights)} and the sources are {sorted(names)}; name each one")
    exact = [_exact(name, weights[name]) for name in names]
    total = sum(exact)
    if not total:
        raise ConfigError(f"all weights of {list(names)} are 0; give one source a weight above 0")
    shares = tuple(weight / total for weight in exact)
    for name, share in zip(names, shares, strict=True):
        if 0 < share < Fraction(1, BLOCK_ROWS):
            raise ConfigError(
                f"the weight of source {name!r} is {float(share):.2g} of the whole, which is less than one sample in a "
                f"block of {BLOCK_ROWS}; raise it to {1 / BLOCK_ROWS:.6f}, or set it to 0"
            )
    return shares


def _exact(name: str, weight: float) -> Fraction:
    is_number = isinstance(weight, Real) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"the weight of source {name!r} is {weight!r}; pass a number from 0, such as 0.3")
    return Fraction(str(weight))
