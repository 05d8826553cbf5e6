"""One rank in one attempt: its events, in any order and any number of times, as pieces of time that do not overlap."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.goodput import events
from cacheloader.goodput.categories import Category, Part
from cacheloader.goodput.table import Table, narrowed

if TYPE_CHECKING:
    from cacheloader.goodput.events import Event

HANG_FACTOR = 10
"""A step that computes this many times as long as the rank's median step is a hang, by what exceeds the median …"""

HANG_MIN_NS = 10**9
"""… if that is at least so much."""

STEP_FIELDS = ("seq", "mono_ns", "step", "dur_ns", "exposed_ns", "fetch_ns", "wait_ns", "tokens", "samples", "epoch")
"""Columns of ``Painted.table``; behind them lie ``COLLECTIVES`` and ``SOURCE``."""

COLLECTIVES = len(STEP_FIELDS)
"""Column: where the step's collectives lie in ``Painted.stays``, as ``offset << 16 | count``; -1: nowhere."""

SOURCE = COLLECTIVES + 1
"""Column: index into ``Painted.sources`` of what was waited for; -1: unknown."""

_MAX_STAYS = 2**16 - 1
_NUM_COLUMNS = SOURCE + 1
_PENDING_ROWS = 2**13
"""Steps that may wait until they are packed."""

_START_UP_PHASES = frozenset(("init", "rendezvous", "ckpt_find", "ckpt_read", "loader_restore", "warmup"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A piece of time that is no step, on the wall clock, half open.

    Attributes:
        start_ns: Since 1970.
        end_ns: Likewise.
        category: What it is; ``INIT`` stands for ``RESTART``, too, until the attempt is known.
        label: Name of the stage or phase.
    """

    start_ns: int
    end_ns: int
    category: Category
    label: str


class Track:
    """Events of one rank (``rank >= 0``) in one attempt.

    Attributes:
        node: Host.
        rank: Which.
        world: Ranks of its attempt.
    """

    def __init__(self, first: Event) -> None:
        self.node, self.rank, self.world = first.node, first.rank, first.world
        self.others: dict[int, Event] = {}
        """Events that are no steps, by ``seq``."""
        self._table = Table(_NUM_COLUMNS)
        """Steps in order, each once, without those of ``_new``."""
        self._new: list[np.ndarray] = []
        self._num_new = 0
        self._late: array[int] = array("q")
        """What a device told of steps later, four numbers each: seq, ``mono_ns``, exposed fetch or -1, collectives."""
        self._late_ends: tuple[events.StepLate, ...] = ()
        """Of these the first one by number, the earliest and the latest: there are as many of them as of steps."""
        self._stays: array[int] = array("q")
        self._sources: dict[str, int] = {}
        self._built: tuple[int, Painted] | None = None
        self._num_taken = 0
        self._first_step: tuple[int, int] | None = None
        """Number of the first step's event and what makes its monotonic time one of the wall clock."""

    def add(self, event: Event) -> None:
        """Take one event; one that is known already changes nothing."""
        if isinstance(event, events.Step):
            self.add_steps([event])
            return
        if isinstance(event, events.StepLate):
            exposed_ns = nanoseconds(event.exposed_s) if event.exposed_s >= 0 else -1
            self._late.extend((event.seq, event.of_mono_ns, exposed_ns, self._keep_stays(event.coll_us)))
            known = [*self._late_ends, event]
            self._late_ends = (
                min(known, key=lambda late: late.seq),
                min(known, key=lambda late: late.mono_ns),
                max(known, key=lambda late: late.mono_ns),
            )
        elif event.seq not in self.others:
            self.others[event.seq] = event
        self._num_taken += 1

    def add_steps(self, found: list[events.Step]) -> None:
        """Take steps of this rank, in any order."""
        rows = np.empty((len(found), _NUM_COLUMNS), dtype=np.int64)
        rows[:, 0] = [event.seq for event in found]
        rows[:, 1] = [event.mono_ns for event in found]
        rows[:, 2] = [event.step for event in found]
        rows[:, 3] = _whole([event.dur_s for event in found])
        exposed_s = np.array([event.exposed_s for event in found])
        rows[:, 5] = _whole([event.fetch_s for event in found])
        rows[:, 4] = np.where(exposed_s < 0, rows[:, 5], _whole(exposed_s))
        wait_s = np.array([event.coll_wait_s for event in found])
        rows[:, 6] = np.where(wait_s < 0, -1, _whole(wait_s))
        rows[:, 7] = [event.tokens for event in found]
        rows[:, 8] = [event.samples for event in found]
        rows[:, 9] = [event.epoch for event in found]
        counts = np.array([min(len(event.coll_us), _MAX_STAYS) for event in found], dtype=np.int64)
        offsets = len(self._stays) + np.cumsum(counts) - counts
        rows[:, COLLECTIVES] = np.where(counts > 0, offsets << 16 | counts, -1)
        self._stays.extend(chain.from_iterable(event.coll_us[:_MAX_STAYS] for event in found))
        names = self._sources
        rows[:, SOURCE] = [names.setdefault(event.source, len(names)) if event.source else -1 for event in found]
        self._new.append(rows)
        self._num_new += len(rows)
        if self._num_new >= _PENDING_ROWS:
            self._pack()
        self._num_taken += len(found)
        earliest = min(found, key=lambda event: event.seq)
        if self._first_step is None or earliest.seq < self._first_step[0]:
            self._first_step = (earliest.seq, earliest.wall_ns - earliest.mono_ns)

    def painted(self) -> Painted:
        """Everything known so far, in order."""
        if self._built is None or self._built[0] != self._num_taken:
            self._built = None  # its arrays are as large as the new ones
            self._built = (self._num_taken, self._paint())
        return self._built[1]

    def _keep_stays(self, coll_us: tuple[int, ...]) -> int:
        count = min(len(coll_us), _MAX_STAYS)
        offset = len(self._stays)
        self._stays.extend(coll_us[:count])
        return offset << 16 | count if count else -1

    def _pack(self) -> None:
        if self._new:
            self._table.add(np.concatenate(self._new))
            self._new.clear()
            self._num_new = 0

    def _steps(self) -> Table:
        self._pack()
        if self._late and len(self._table):
            return Table.of(self._with_late(self._table.rows()))
        return self._table.snapshot()

    def _with_late(self, table: np.ndarray) -> np.ndarray:
        late = np.array(self._late, dtype=np.int64).reshape(-1, 4)
        late = late[np.unique(late[:, 0], return_index=True)[1]]
        order = np.argsort(table[:, 1], kind="stable")
        clock = table[order, 1]
        place = np.searchsorted(clock, late[:, 1], side="right") - 1
        is_known = (place >= 0) & (clock[place] == late[:, 1]) if len(clock) else np.zeros(len(late), dtype=bool)
        late, row = late[is_known], order[place[is_known]]
        said = late[:, 2] >= 0  # the device cannot have waited for data longer than the loop did
        table[row[said], 4] = np.minimum(table[row[said], 5], late[said, 2])
        said = (late[:, 3] >= 0) & (table[row, COLLECTIVES] < 0)
        table[row[said][::-1], COLLECTIVES] = late[said, 3][::-1]  # the first that was said counts
        return table

    def _paint(self) -> Painted:
        table = self._steps()
        others = sorted([*self.others.values(), *self._late_ends], key=lambda event: event.seq)
        # The wall clock may jump; within a process only its first reading counts.
        first = min(others, key=lambda event: event.seq, default=None)
        readings = [] if first is None else [(first.seq, first.wall_ns - first.mono_ns)]
        readings += [] if self._first_step is None else [self._first_step]
        offset_ns = min(readings)[1]
        marks, open_phase = _marks(others, offset_ns)
        said_ns = table.column(1) + offset_ns
        # A step that ends before the one in front of it has no time: its begins and ends have to increase.
        end_ns = np.maximum.accumulate(said_ns) if len(said_ns) else said_ns
        earliest_ns = np.concatenate(([np.iinfo(np.int64).min], end_ns[:-1])) if len(end_ns) else end_ns
        start_ns = np.maximum(said_ns - table.column(3), earliest_ns)
        last_ns = [int(end_ns[-1])] if len(end_ns) else []
        last_ns += [event.mono_ns + offset_ns for event in others]
        return Painted(
            offset_ns=offset_ns,
            table=table,
            stays=narrowed(self._stays),
            sources=tuple(self._sources),
            start_ns=start_ns,
            end_ns=end_ns,
            marks=marks,
            open_phase=open_phase,
            first_ns=_first_ns(others, start_ns, offset_ns),
            last_ns=max(last_ns),
            run_ns=min((e.mono_ns + offset_ns for e in others if isinstance(e, events.AttemptStart)), default=0),
            end=_end(others, offset_ns),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Painted:
    """A track in order. Times are on the wall clock.

    Attributes:
        offset_ns: What makes a monotonic time of it one of the wall clock.
        table: One row a step, columns ``STEP_FIELDS``, ``COLLECTIVES`` and ``SOURCE``.
        stays: Durations of collectives, in microseconds.
        sources: What was waited for.
        start_ns: Of each step, not before the end of the one before it.
        end_ns: Of each step.
        marks: What is no step, sorted, not overlapping; where a step overlaps one, the mark counts.
        open_phase: A phase that began and never ended: name and time.
        first_ns: First sign of life: the start of the process, if that is known.
        run_ns: When the run was opened, behind the imports.
        last_ns: Last sign of life of the process itself.
        end: Its own word on its end: time and cause.
    """

    offset_ns: int
    table: Table
    stays: np.ndarray
    sources: tuple[str, ...]
    start_ns: np.ndarray
    end_ns: np.ndarray
    marks: list[Mark]
    open_phase: tuple[str, int] | None
    first_ns: int
    last_ns: int
    run_ns: int
    end: tuple[int, str] | None

    @property
    def step_numbers(self) -> np.ndarray:
        """Of each step."""
        return self.table.column(2)

    def pieces(self, wait_ns: np.ndarray, hang_ns: np.ndarray, warmup_ns: int) -> Pieces:
        """The steps, cut into parts: fetch first, then the computing, then warm-up, hang and waiting.

        Args:
            wait_ns: Of each step, time in which it waited for other ranks.
            hang_ns: Of each step, time that it hung.
            warmup_ns: Time beyond the median that the first step took.
        """
        fetch_ns = self.fetch_ns()
        step = np.arange(len(self.start_ns), dtype=np.int32)
        touched = self._touched()
        rows: list[tuple[int, int, int, int]] = []
        for i in np.flatnonzero(touched):
            rows += self._cut(int(i), int(fetch_ns[i]), int(wait_ns[i]), int(hang_ns[i]), warmup_ns if i == 0 else 0)
        plain = ~touched
        begin, end = self.start_ns[plain], self.end_ns[plain]
        left = end - begin - fetch_ns[plain]
        waits = np.clip(wait_ns[plain], 0, left)
        hangs = np.clip(hang_ns[plain], 0, left - waits)
        warm = np.zeros_like(left)
        if len(step) and plain[0]:
            warm[0] = min(warmup_ns, int(left[0] - waits[0] - hangs[0]))
        parts = (Part.FETCH, Part.COMPUTE, Part.WARMUP, Part.HANG, Part.WAIT)
        edges = np.empty((len(begin), len(parts) + 1), dtype=np.int64)
        for column, edge in enumerate(
            (begin, begin + fetch_ns[plain], end - waits - hangs - warm, end - waits - hangs, end - waits, end)
        ):
            edges[:, column] = edge
        is_piece = edges[:, 1:] > edges[:, :-1]
        of_step, of_part = np.nonzero(is_piece)
        pieces = Pieces(
            start_ns=edges[:, :-1][is_piece],
            end_ns=edges[:, 1:][is_piece],
            part=np.array(parts, dtype=np.int8)[of_part],
            step=step[plain][of_step],
        )
        return pieces.with_rows(np.array(rows, dtype=np.int64).reshape(-1, 4)) if rows else pieces

    def busy_ns(self) -> np.ndarray:
        """Of each step, its time without fetching and without marks inside it."""
        busy: np.ndarray = self.end_ns - self.start_ns - self.fetch_ns()
        touched = np.flatnonzero(self._touched())
        exposed_ns = self.table.column(4)[touched]
        for i, exposed in zip(touched.tolist(), exposed_ns.tolist(), strict=True):
            end = int(self.end_ns[i])
            begin = min(end, int(self.start_ns[i]) + exposed)
            busy[i] = max(0, sum(stop - start for start, stop in _without(begin, end, self.marks)))
        return busy

    def fetch_ns(self) -> np.ndarray:
        """Of each step, its exposed fetch."""
        exposed: np.ndarray = np.clip(self.table.column(4), 0, self.end_ns - self.start_ns)
        return exposed

    def _touched(self) -> np.ndarray:
        touched = np.zeros(len(self.start_ns), dtype=bool)
        for mark in self.marks:
            low = int(np.searchsorted(self.end_ns, mark.start_ns, side="right"))
            high = int(np.searchsorted(self.start_ns, mark.end_ns, side="left"))
            touched[low:high] = True
        return touched

    def _cut(
        self, i: int, fetch_ns: int, wait_ns: int, hang_ns: int, warmup_ns: int
    ) -> list[tuple[int, int, int, int]]:
        begin, end = int(self.start_ns[i]), int(self.end_ns[i])
        rows = [(a, b, int(Part.FETCH), i) for a, b in _without(begin, begin + fetch_ns, self.marks)]
        for a, b in reversed(_without(begin + fetch_ns, end, self.marks)):
            edge = b
            for part, amount in ((Part.WAIT, wait_ns), (Part.HANG, hang_ns), (Part.WARMUP, warmup_ns)):
                taken = min(amount, edge - a)
                if taken > 0:
                    rows.append((edge - taken, edge, int(part), i))
                    edge -= taken
                    if part is Part.WAIT:
                        wait_ns -= taken
                    elif part is Part.HANG:
                        hang_ns -= taken
                    else:
                        warmup_ns -= taken
            rows.append((a, edge, int(Part.COMPUTE), i))
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Pieces of steps, sorted, not overlapping: four arrays of one length.

    Attributes:
        start_ns: Wall clock.
        end_ns: Wall clock.
        part: A ``Part``.
        step: Index of the step in ``Painted.table``.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    part: np.ndarray
    step: np.ndarray

    def with_rows(self, rows: np.ndarray) -> Pieces:
        """With more of them, as rows of start, end, part and step."""
        rows = rows[rows[:, 1] > rows[:, 0]]
        order = np.argsort(np.concatenate([self.start_ns, rows[:, 0]]), kind="stable")
        return Pieces(
            start_ns=np.concatenate([self.start_ns, rows[:, 0]])[order],
            end_ns=np.concatenate([self.end_ns, rows[:, 1]])[order],
            part=np.concatenate([self.part, rows[:, 2].astype(np.int8)])[order],
            step=np.concatenate([self.step, rows[:, 3].astype(np.int32)])[order],
        )


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, so that sums are exact."""
    return max(0, round(seconds * 1e9))


def _whole(seconds: list[float] | np.ndarray) -> np.ndarray:
    """``nanoseconds`` of many."""
    found: np.ndarray = np.maximum(np.rint(np.asarray(seconds, dtype=np.float64) * 1e9), 0).astype(np.int64)
    return found


def median_ns(values: np.ndarray) -> int:
    """The lower median, a value that occurred; 0 of none."""
    return int(np.sort(values)[(len(values) - 1) // 2]) if len(values) else 0


def _marks(others: list[Event], offset_ns: int) -> tuple[list[Mark], tuple[str, int] | None]:
    """Phases and checkpoint stalls; of nested ones the inner, which ends first, keeps its time."""
    marks: list[Mark] = []
    begun: list[tuple[str, int]] = []
    for event in others:
        now_ns = event.mono_ns + offset_ns
        match event:
            case events.PhaseBegin():
                begun.append((event.phase, now_ns))
            case events.PhaseEnd():
                names = [name for name, _ in begun]
                if event.phase in names:
                    index = len(names) - 1 - names[::-1].index(event.phase)
                    _, start_ns = begun[index]
                    del begun[index:]
                    _paint(marks, start_ns, now_ns, phase_category(event.phase), event.phase)
            case events.CkptStaged():
                _paint(marks, now_ns - nanoseconds(event.stall_s), now_ns, Category.CKPT, "save")
            case _:
                pass
    return marks, begun[0] if begun else None


def _paint(marks: list[Mark], start_ns: int, end_ns: int, category: Category, label: str) -> None:
    new = [
        Mark(start_ns=start, end_ns=stop, category=category, label=label)
        for start, stop in _without(start_ns, end_ns, marks)
    ]
    marks += new
    marks.sort(key=lambda mark: mark.start_ns)


def _without(start_ns: int, end_ns: int, marks: list[Mark]) -> list[tuple[int, int]]:
    """``[start_ns, end_ns)`` without the sorted ``marks``."""
    left: list[tuple[int, int]] = []
    first = bisect_right(marks, start_ns, key=lambda mark: mark.end_ns)  # the first that ends behind the start
    for mark in marks[first:]:
        if mark.start_ns >= end_ns:
            break
        if mark.start_ns > start_ns:
            left.append((start_ns, mark.start_ns))
        start_ns = max(start_ns, mark.end_ns)
    if start_ns < end_ns:
        left.append((start_ns, end_ns))
    return left


def phase_category(phase: str) -> Category:
    """Of a phase; ``INIT`` as in ``Mark``."""
    if phase in _START_UP_PHASES:
        return Category.INIT
    return Category.EVAL if phase == "eval" else Category.OTHER


def _first_ns(others: list[Event], start_ns: np.ndarray, offset_ns: int) -> int:
    found = [event.mono_ns + offset_ns for event in others] + [int(start) for start in start_ns[:1]]
    earliest = min(found)
    for event in others:
        if isinstance(event, events.AttemptStart) and 0 < event.process_start_ns < earliest:
            return event.process_start_ns
    return earliest


def _end(others: list[Event], offset_ns: int) -> tuple[int, str] | None:
    ends = [event for event in others if isinstance(event, events.AttemptEnd)]
    return (ends[-1].mono_ns + offset_ns, ends[-1].cause) if ends else None
