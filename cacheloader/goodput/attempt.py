"""One launch of the job: its ranks, when it died, when somebody reacted, and when the last process was gone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.goodput import events
from cacheloader.goodput.track import Track, median_ns

if TYPE_CHECKING:
    from cacheloader.goodput.events import Event
    from cacheloader.goodput.track import Painted

DONE = "done"


@dataclass(slots=True)
class Attempt:
    """The events of one attempt.

    Attributes:
        name: Of the launch.
        tracks: By (rank, node).
        failures: What anybody noticed of failures, by (node, rank of the writer, seq).
        signs: By rank, what the daemon saw of its process: wall time to state.
    """

    name: str
    tracks: dict[tuple[int, str], Track] = field(default_factory=dict)
    failures: dict[tuple[str, int, int], events.Fail] = field(default_factory=dict)
    signs: dict[int, dict[int, str]] = field(default_factory=dict)
    world: int = 0
    earliest_ns: int = np.iinfo(np.int64).max

    def add(self, event: Event) -> None:
        """Take one event of this attempt."""
        self.earliest_ns = min(self.earliest_ns, event.wall_ns)
        self.world = max(self.world, event.world)
        if isinstance(event, events.Fail):
            self.failures.setdefault((event.node, event.rank, event.seq), event)
        if isinstance(event, events.Heartbeat):
            signs = self.signs.setdefault(event.of_rank, {})
            signs[event.wall_ns] = max(event.state, signs.get(event.wall_ns, ""))
        elif event.rank >= 0:
            key = (event.rank, event.node)
            if key not in self.tracks:
                self.tracks[key] = Track(event)
            self.tracks[key].add(event)

    def add_steps(self, found: list[events.Step]) -> None:
        """Take steps of one rank (``rank >= 0``)."""
        self.earliest_ns = min(self.earliest_ns, *(event.wall_ns for event in found))
        self.world = max(self.world, *(event.world for event in found))
        key = (found[0].rank, found[0].node)
        if key not in self.tracks:
            self.tracks[key] = Track(found[0])
        self.tracks[key].add_steps(found)

    @property
    def launcher(self) -> str:
        """Who started it, "" if nobody said."""
        for _, track in sorted(self.tracks.items()):
            for _, event in sorted(track.others.items()):
                if isinstance(event, events.AttemptStart):
                    return event.launcher
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """When what happened to an attempt, on the wall clock.

    Attributes:
        start_ns: First sign of life of any rank.
        end_ns: Last one.
        is_done: Whether every rank said that it was done.
        is_live: Whether it goes on as far as anybody knows.
        died_ns: When the first rank died, or stopped to move; ``end_ns`` where none did.
        declared_ns: When something reacted.
        cause: What is known of the failure.
        first_rank: Which rank it began with, -1 if unknown.
    """

    start_ns: int
    end_ns: int
    is_done: bool
    is_live: bool
    died_ns: int
    declared_ns: int
    cause: str
    first_rank: int


def life(attempt: Attempt, painted: dict[tuple[int, str], Painted], *, now_ns: int | None) -> Life:
    """Find out.

    Args:
        attempt: Its events.
        painted: Its tracks in order.
        now_ns: The present, if nobody has taken over since; else ``None``.
    """
    starts = [paint.first_ns for paint in painted.values()] or [attempt.earliest_ns]
    exits: dict[int, int] = {}
    for event in attempt.failures.values():
        if event.kind == "exit":  # whoever was said to be gone and came back is gone when it is said last
            exits[event.of_rank] = max(exits.get(event.of_rank, 0), event.died_wall_ns or event.wall_ns)
    ends: dict[int, int] = {}
    for (rank, _), paint in painted.items():
        seen = [wall for wall, state in attempt.signs.get(rank, {}).items() if state not in ("", "Z", "X")]
        own = [paint.end[0]] if paint.end is not None else []
        ends[rank] = max([paint.last_ns, *seen, *own, *([exits[rank]] if rank in exits else [])])
    others = [
        event.died_wall_ns or event.wall_ns if event.first_seen_by == "daemon" else event.wall_ns
        for event in attempt.failures.values()
    ]
    end_ns = max([*ends.values(), *others, *starts])
    is_done = (
        len(painted) >= attempt.world
        and bool(painted)
        and all(paint.end is not None and paint.end[1] == DONE for paint in painted.values())
    )
    troubles = _troubles(attempt, painted)
    is_live = now_ns is not None and not is_done and not troubles
    if is_done or is_live:
        if is_live and now_ns is not None:
            end_ns = max(end_ns, now_ns)
        return Life(
            start_ns=min(starts), end_ns=end_ns, is_done=is_done, is_live=is_live, died_ns=end_ns, declared_ns=end_ns,
            cause="", first_rank=-1,
        )  # fmt: skip
    died_ns, first_rank, cause = _death(attempt, painted, troubles, end_ns)
    reactions = [event.wall_ns for event in attempt.failures.values() if event.first_seen_by not in ("", "daemon")]
    reactions += [paint.end[0] for (rank, _), paint in painted.items() if rank != first_rank and paint.end is not None]
    reactions += [wall for rank, wall in exits.items() if rank != first_rank]
    declared_ns = min([wall for wall in reactions if wall >= died_ns], default=end_ns)
    return Life(
        start_ns=min(starts), end_ns=end_ns, is_done=False, is_live=False, died_ns=died_ns,
        declared_ns=min(declared_ns, end_ns), cause=cause, first_rank=first_rank,
    )  # fmt: skip


def _troubles(attempt: Attempt, painted: dict[tuple[int, str], Painted]) -> list[tuple[int, int, str]]:
    """What is known of deaths: (when, rank, cause)."""
    done = {rank for (rank, _), paint in painted.items() if paint.end is not None and paint.end[1] == DONE}
    found = [
        (event.died_wall_ns or event.wall_ns, event.of_rank, event.kind)
        for event in attempt.failures.values()
        if event.of_rank not in done or event.of_rank < 0
    ]
    for (rank, _), paint in painted.items():
        if paint.end is not None and paint.end[1] != DONE:
            found.append((paint.end[0], rank, paint.end[1]))
    return sorted(found)


def _death(
    attempt: Attempt, painted: dict[tuple[int, str], Painted], troubles: list[tuple[int, int, str]], end_ns: int
) -> tuple[int, int, str]:
    """When it began, with which rank and why; the first trouble may show long after the ranks stood still."""
    died_ns, first_rank, cause = troubles[0] if troubles else (end_ns, -1, "the ranks fell silent")
    last_steps = [int(paint.end_ns[-1]) for paint in painted.values() if len(paint.end_ns)]
    last_marks = [paint.marks[-1].end_ns for paint in painted.values() if paint.marks]
    silent = [rank for (rank, _), paint in painted.items() if paint.end is None]
    durations = [paint.table.column(3) for paint in painted.values() if len(paint.end_ns)]
    is_witnessed = any(e.died_wall_ns == died_ns and e.first_seen_by != "daemon" for e in attempt.failures.values())
    in_phase = any(paint.open_phase is not None for paint in painted.values())  # those take as long as they take
    if last_steps and not is_witnessed and not in_phase and any(len(values) > 1 for values in durations):
        usual_ns = median_ns(np.concatenate(durations))
        stood_still_ns = max([*last_steps, *last_marks]) + usual_ns
        # Exits that somebody saw are exact, unless they come long after everything stood still. A rank that vanished
        # without a trace did so in its next step.
        is_seen = not silent or any(event.kind == "exit" for event in attempt.failures.values())
        slack_ns = max(3 * usual_ns, 10**9) if is_seen else 0
        if died_ns > stood_still_ns + slack_ns:
            still = [rank for rank in silent if rank != first_rank] if first_rank not in silent else [first_rank]
            return stood_still_ns, (still or [first_rank])[0], f"stood still, then {cause}" if cause else "stood still"
    return min(died_ns, end_ns), first_rank, cause
