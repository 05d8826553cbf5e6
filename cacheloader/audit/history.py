"""From the records of all attempts to the steps that count: those that no later resume went back behind.

A fold without files or clocks. An iteration that begins at (epoch, row) has rolled back every step of older ones at or
beyond that place.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from cacheloader.audit.report import Finding
from cacheloader.steps import Begin, Step

if TYPE_CHECKING:
    from collections.abc import Iterable


class At(NamedTuple):
    """A place in the order; earlier places compare smaller."""

    epoch: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStep:
    """One step that counts.

    Attributes:
        at: Where it starts.
        begin: How the iteration began that it belongs to; tells data set and order.
        parts: What each rank recorded of it, by rank; a rank that is there twice got it twice.
    """

    at: At
    begin: Begin
    parts: tuple[Step, ...]

    @property
    def rows(self) -> int:
        """Rows that it takes."""
        return self.parts[0].rows

    @property
    def global_batch(self) -> int:
        """Samples over all ranks."""
        return self.parts[0].global_batch

    @property
    def world_size(self) -> int:
        """Ranks that share it."""
        return self.parts[0].world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that counts.

    Attributes:
        world_sizes: Of each attempt, in order of time.
        first: The earliest place that any iteration began at: where the records start.
        last_begin: How the latest iteration began.
        steps: In order of their places.
        num_rolled_back: Records that do not count.
        findings: What contradicts itself.
    """

    world_sizes: list[int]
    first: At
    last_begin: Begin
    steps: list[KeptStep]
    num_rolled_back: int
    findings: list[Finding] = field(default_factory=list)


def fold(records: Iterable[Begin | Step]) -> History:
    """What counts of the records; in the order of ``steps.Recorded``, with at least one ``Begin`` among them."""
    findings: list[Finding] = []
    # An iteration is named by its attempt and its number in it: all ranks begin together, and a process that goes back
    # by load_state_dict begins again.
    begins: dict[tuple[str, int], list[Begin]] = defaultdict(list)
    steps: list[tuple[tuple[str, int], Step]] = []
    stream, number = ("", -1), -1
    for record in records:
        if (record.attempt, record.rank) != stream:
            stream, number = (record.attempt, record.rank), -1
        if isinstance(record, Begin):
            number += 1
            begins[record.attempt, number].append(record)
        elif number < 0:
            findings.append(
                Finding(
                    kind="file",
                    text=f"rank {record.rank} of attempt {record.attempt} has a step before it began: {record}",
                )
            )
        else:
            steps.append(((record.attempt, number), record))
    started = {name: min(begin.wall_ns for begin in begins[name, 0]) for name, _ in begins}
    iterations = sorted(begins, key=lambda iteration: (started[iteration[0]], iteration))
    findings += _disagreements(begins)
    place = {iteration: min(At(b.epoch, b.row) for b in begins[iteration]) for iteration in iterations}
    rolled_back_from: dict[tuple[str, int], At | None] = {}
    cut: At | None = None
    for iteration in reversed(iterations):
        rolled_back_from[iteration] = cut
        cut = place[iteration] if cut is None else min(cut, place[iteration])
    groups: dict[At, list[tuple[tuple[str, int], Step]]] = defaultdict(list)
    for iteration, step in steps:
        at, cut = At(step.epoch, step.row), rolled_back_from[iteration]
        if cut is None or at < cut:
            groups[at].append((iteration, step))
    kept = []
    for at in sorted(groups):
        parts = tuple(sorted((step for _, step in groups[at]), key=lambda step: step.rank))
        if len({(part.rows, part.global_batch, part.world_size) for part in parts}) > 1:
            sizes = sorted({f"{part.rows} rows on {part.world_size} ranks" for part in parts})
            text = f"the step at row {at.row} of epoch {at.epoch} was taken as {' and as '.join(sizes)}"
            findings.append(Finding(kind="rank", text=text, epoch=at.epoch))
        kept.append(KeptStep(at=at, begin=begins[groups[at][0][0]][0], parts=parts))
    attempts = sorted(started, key=lambda name: (started[name], name))
    return History(
        world_sizes=[begins[name, 0][0].world_size for name in attempts],
        first=min(place.values()),
        last_begin=begins[iterations[-1]][0],
        steps=kept,
        num_rolled_back=len(steps) - sum(len(step.parts) for step in kept),
        findings=findings,
    )


def _disagreements(begins: dict[tuple[str, int], list[Begin]]) -> Iterable[Finding]:
    for (attempt, number), ranks in begins.items():
        for what, values in (
            ("place", {f"row {begin.row} of epoch {begin.epoch}" for begin in ranks}),
            ("world", {f"{begin.world_size} ranks" for begin in ranks}),
            ("global batch", {f"{begin.global_batch} samples" for begin in ranks}),
            ("manifest", {begin.manifest for begin in ranks}),
            ("order", {str(sorted(begin.order.items())) for begin in ranks}),
        ):
            if len(values) > 1:
                text = f"the ranks of attempt {attempt} began iteration {number} each with another {what}: "
                yield Finding(kind="rank", text=text + " and ".join(sorted(values)))
