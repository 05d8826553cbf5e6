"""What there is to run, how long it takes, and how a limit of time is shared. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


SLACK = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A scenario, or a program of its own that writes a report.

    Attributes:
        theme: Its name on the command line and in file names.
        module: Where its ``SCENARIO`` is, or the program.
        prepare_s: About what it takes before its first round, on two calm cores with every peer; of a program, in all.
        round_s: About what a round takes; 0 for a program, which has no rounds.
        most_rounds: Rounds that say all it has to say, however many others have.
        arguments: For a program.
    """

    theme: str
    module: str
    prepare_s: float
    round_s: float = 0.0
    most_rounds: int | None = None
    arguments: tuple[str, ...] = ()

    @property
    def is_program(self) -> bool:
        """Whether it is run as ``python -m module``."""
        return not self.round_s

    @property
    def least_s(self) -> float:
        """About what it takes to measure anything at all."""
        return self.prepare_s + self.round_s

    def rounds(self, repeats: int) -> int:
        """Rounds, where the others have so many."""
        return repeats if self.most_rounds is None else min(repeats, self.most_rounds)

    def estimate_s(self, repeats: int) -> float:
        """About how long it takes."""
        return self.prepare_s + self.round_s * self.rounds(repeats)


SCENARIOS = {
    part.theme: part
    for part in (
        Part(theme="two-epochs", module="benchmarks.scenarios.two_epochs", prepare_s=70, round_s=300),
        Part(theme="small-samples", module="benchmarks.scenarios.small_samples", prepare_s=30, round_s=75),
        Part(theme="decode", module="benchmarks.scenarios.decode", prepare_s=50, round_s=70),
        Part(theme="stall", module="benchmarks.scenarios.stall", prepare_s=40, round_s=100),
        Part(theme="sharing", module="benchmarks.scenarios.sharing", prepare_s=30, round_s=100),
        Part(theme="volume", module="benchmarks.scenarios.volume", prepare_s=15, round_s=50),
        Part(theme="fetch-cost", module="benchmarks.scenarios.fetch_cost", prepare_s=25, round_s=25),
        Part(theme="node", module="benchmarks.scenarios.node", prepare_s=15, round_s=35),
        Part(theme="idle", module="benchmarks.scenarios.idle", prepare_s=5, round_s=220, most_rounds=1),
        Part(theme="recovery", module="benchmarks.scenarios.recovery", prepare_s=60, round_s=25),
        Part(theme="checkpoint", module="benchmarks.scenarios.checkpoint", prepare_s=5, round_s=50),
        Part(theme="position", module="benchmarks.scenarios.position", prepare_s=20, round_s=35),
    )
}

PROGRAMS = {
    part.theme: part
    for part in (
        Part(theme="scale", module="benchmarks.scale", prepare_s=20),
        Part(theme="pressure-bytes", module="benchmarks.pressure", prepare_s=150, arguments=("--only", "bytes")),
        Part(theme="pressure-stalls", module="benchmarks.pressure", prepare_s=700, arguments=("--only", "stalls")),
        Part(theme="hedging", module="benchmarks.hedging", prepare_s=250),
        Part(theme="overhead", module="benchmarks.overhead", prepare_s=120),
    )
}

PARTS = SCENARIOS | PROGRAMS

_TARGETS = (
    "two-epochs", "volume", "stall", "sharing", "small-samples", "decode", "fetch-cost", "node", "idle", "scale",
    "pressure-bytes",
)  # fmt: skip
PROFILES = {"targets": _TARGETS, "all": (*_TARGETS, *(theme for theme in PARTS if theme not in _TARGETS))}
"""``targets``: everything that a target speaks of; ``all``: everything there is."""


def shares_s(parts: Sequence[Part], *, repeats: int, budget_s: float) -> float:
    """What the first of ``parts`` may take of what is left: in proportion to the estimates, and ``SLACK`` times that.

    So an estimate may be off without costing a round, and what is lost in the end is lost by the last parts.

    Args:
        parts: Still to run, in order.
        repeats: Rounds of each.
        budget_s: What is left, infinite for no limit.
    """
    whole = sum(part.estimate_s(repeats) for part in parts)
    if math.isinf(budget_s):
        return budget_s
    return min(1.0, SLACK * parts[0].estimate_s(repeats) / whole) * max(0.0, budget_s)


def table(parts: Sequence[Part], *, repeats: int) -> str:
    """The estimates for people."""
    lines = []
    for part in parts:
        times = part.rounds(repeats) if part.round_s else 1
        lines.append(f"{part.theme:16} {times} ×, about {part.estimate_s(repeats) / 60:4.1f} min")
    total = sum(part.estimate_s(repeats) for part in parts)
    return "\n".join([*lines, f"{'in all':16}      about {total / 60:4.0f} min on two calm cores with every peer"])
