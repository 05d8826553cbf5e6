"""Which steps were kept in the end: those that a durable checkpoint covers and that nothing went back behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.goodput import events
from cacheloader.goodput.categories import Fate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheloader.goodput.track import Painted, Track

_NO_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The answer.

    Attributes:
        committed: The last step that a surviving checkpoint covers, 0 for none.
        fates: For each attempt and track, a ``Fate`` for each of its steps.
        undone_by: Likewise, for lost steps the attempt whose resume undid them, or -1 for a rollback inside their own.
    """

    committed: int
    fates: list[list[np.ndarray]]
    undone_by: list[list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class _Cut:
    seq: int
    wall_ns: int
    to_step: int


def lineage(attempts: Sequence[Sequence[Track]], painted: Sequence[Sequence[Painted]]) -> Lineage:
    """Fold commits, restores and rollbacks of all attempts, oldest first."""
    cuts = [[_cuts(track) for track in tracks] for tracks in attempts]
    entries = [_entry(cuts[k], painted[k]) for k in range(len(attempts))]
    # Behind which step does any later attempt go back, and which one first?
    limits, undoers = [_NO_LIMIT] * len(attempts), [-1] * len(attempts)
    limit, undoer = _NO_LIMIT, -1
    for k in reversed(range(len(attempts))):
        limits[k], undoers[k] = limit, undoer
        entry = entries[k]
        lowest = _below_own_cuts(_NO_LIMIT if entry is None else entry, cuts[k])
        if lowest <= limit:
            limit, undoer = lowest, k
    committed = 0
    survivals: list[list[np.ndarray]] = []
    inner: list[list[np.ndarray]] = []
    for k, tracks in enumerate(attempts):
        entry = entries[k]
        if entry is not None and entry <= limits[k]:
            committed = max(committed, _below_own_cuts(entry, cuts[k]))
        survivals.append([])
        inner.append([])
        for track, own, paint in zip(tracks, cuts[k], painted[k], strict=True):
            effective, by_seq = (own, True) if own else (_lowest(cuts[k]), False)
            numbers = paint.step_numbers
            undone_inside = np.zeros(len(numbers), dtype=bool)
            for cut in effective:
                before = paint.table.column(0) < cut.seq if by_seq else paint.end_ns <= cut.wall_ns
                undone_inside |= before & (numbers > cut.to_step)
            inner[-1].append(undone_inside)
            survivals[-1].append(~undone_inside & (numbers <= limits[k]))
            for event in track.others.values():
                if isinstance(event, events.CkptCommit | events.Restore) and event.step <= limits[k]:
                    later = [c for c in effective if (c.seq > event.seq if by_seq else c.wall_ns > event.wall_ns)]
                    if all(event.step <= cut.to_step for cut in later):
                        committed = max(committed, event.step)
    fates = [
        [
            np.where(alive, np.where(paint.step_numbers <= committed, Fate.KEPT, Fate.PROVISIONAL), Fate.LOST).astype(
                np.int8
            )
            for alive, paint in zip(survivals[k], painted[k], strict=True)
        ]
        for k in range(len(attempts))
    ]
    undone = [[np.where(inside, -1, undoers[k]).astype(np.int32) for inside in inner[k]] for k in range(len(attempts))]
    return Lineage(committed=committed, fates=fates, undone_by=undone)


def _cuts(track: Track) -> list[_Cut]:
    found = []
    for seq, event in track.others.items():
        if isinstance(event, events.Restore):
            found.append(_Cut(seq, event.wall_ns, max(0, event.step)))
        elif isinstance(event, events.Rollback):
            found.append(_Cut(seq, event.wall_ns, max(0, event.to_step)))
    return sorted(found, key=lambda cut: cut.seq)


def _lowest(cuts: list[list[_Cut]]) -> list[_Cut]:
    """Those of the lowest rank that has any."""
    return next((own for own in cuts if own), [])


def _entry(cuts: list[list[_Cut]], painted: Sequence[Painted]) -> int | None:
    """The step behind which an attempt began; without a restore event, what its first step says."""
    firsts = [int(paint.step_numbers[0]) - 1 for paint in painted if len(paint.step_numbers)]
    restores = [own[0].to_step for own in cuts if own]
    if firsts:
        return min(max(0, min(firsts)), *restores) if restores else max(0, min(firsts))
    return min(restores, default=None)


def _below_own_cuts(step: int, cuts: list[list[_Cut]]) -> int:
    lowest = [cut.to_step for own in cuts for cut in own]
    return min([step, *lowest])
