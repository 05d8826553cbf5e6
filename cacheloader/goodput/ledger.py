"""The ledger: events in, an exact account out. Knows no clock, file, socket or chance.

Every paid device-second gets one category, by construction: pieces of steps and phases come first, and what lies
between, before and behind them is named by where it lies. Whole nanoseconds throughout, so that sums are equal, not
nearly equal. Events may come in any order and any number of times.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.goodput import events
from cacheloader.goodput.account import Account, AttemptSummary, Failure, Save, Segments, StepStatistics, UndoneWork
from cacheloader.goodput.attempt import Attempt, Life, life
from cacheloader.goodput.categories import Category, Fate, Part
from cacheloader.goodput.histogram import Durations
from cacheloader.goodput.lineage import Lineage, lineage
from cacheloader.goodput.stragglers import LastArrivals, Places, waits
from cacheloader.goodput.track import (
    HANG_FACTOR,
    HANG_MIN_NS,
    Painted,
    Pieces,
    Track,
    median_ns,
    nanoseconds,
    phase_category,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cacheloader.goodput.events import Event

SILENCE_NS = 15 * 10**9
"""A rank that says nothing for three heartbeats is not productive, until it proves the contrary."""

MIN_STEPS_FOR_HANG = 5

_FATED = np.zeros((len(Part), len(Fate)), dtype=np.int8)
"""The category of each part of a step, by the step's fate."""
_FATED[Part.FETCH] = Category.FETCH, Category.FETCH, Category.LOST
_FATED[Part.COMPUTE] = Category.COMPUTE, Category.PROVISIONAL, Category.LOST
_FATED[Part.WAIT] = Category.STRAGGLER, Category.STRAGGLER, Category.LOST
_FATED[Part.HANG] = Category.HANG, Category.HANG, Category.LOST
_FATED[Part.WARMUP] = Category.INIT


@dataclass(slots=True)
class Ledger:
    """Takes events, gives accounts."""

    silence_ns: int = SILENCE_NS
    _attempts: dict[str, Attempt] = field(default_factory=dict)
    _members: dict[tuple[str, str, int, int], tuple[int, int]] = field(default_factory=dict)
    _starts: dict[tuple[str, str, int, int], tuple[int, int]] = field(default_factory=dict)

    def add(self, found: Iterable[Event]) -> None:
        """Take events, known ones included."""
        steps: dict[tuple[str, str, int], list[events.Step]] = {}
        for event in found:
            if isinstance(event, events.Step) and event.rank >= 0:
                steps.setdefault((event.att, event.node, event.rank), []).append(event)
                continue
            key = (event.att, event.node, event.rank, event.seq)
            if isinstance(event, events.Membership):
                self._members[key] = (event.wall_ns, max(0, event.n_devices))
            elif isinstance(event, events.RunStart):
                self._starts[key] = (event.wall_ns, max(0, event.n_devices))
            self._attempt(event.att).add(event)
        for (name, _, _), own in steps.items():
            self._attempt(name).add_steps(own)

    def _attempt(self, name: str) -> Attempt:
        if name not in self._attempts:
            self._attempts[name] = Attempt(name)
        return self._attempts[name]

    def account(self, *, now_ns: int | None = None) -> Account:
        """The account of everything so far.

        Args:
            now_ns: The present, since 1970, if the run may be under way: silence up to it is counted. ``None``: the run
                is over, and its last event ends it.
        """
        attempts = sorted(self._attempts.values(), key=lambda attempt: (attempt.earliest_ns, attempt.name))
        return _Fold(self, attempts, now_ns).account()


class _Fold:
    """One account in the making."""

    def __init__(self, ledger: Ledger, attempts: list[Attempt], now_ns: int | None) -> None:
        self._silence_ns = ledger.silence_ns
        self._attempts = attempts
        self._declared = sorted([*ledger._starts.values(), *ledger._members.values()])
        self._declared = [(wall, count) for wall, count in self._declared if count]
        self._run_start_ns = min((wall for wall, _ in ledger._starts.values()), default=None)
        self._tracks: list[list[Track]] = [[t for _, t in sorted(a.tracks.items())] for a in attempts]
        self._painted: list[list[Painted]] = [[track.painted() for track in tracks] for tracks in self._tracks]
        self._lives = self._find_lives(now_ns)
        self._lineage: Lineage = lineage(self._tracks, self._painted)
        self._arrivals = LastArrivals()
        self._labels: dict[str, int] = {}
        self._segments: list[Segments] = []
        self._undone: Counter[int] = Counter()
        """Time of lost steps, by the attempt whose resume undid them; -1 - k: by a rollback inside attempt k."""

    def account(self) -> Account:
        lives = self._lives
        if not lives:
            return Account.empty()
        start_ns = lives[0].start_ns if self._run_start_ns is None else min(self._run_start_ns, lives[0].start_ns)
        reached_ns = start_ns
        statistics = StepStatistics()
        widths: list[tuple[int, int, int]] = []  # spans with the number of devices
        for k in range(len(self._attempts)):
            begin = max(reached_ns, lives[k].start_ns)
            end = max(begin, lives[k].end_ns)
            if k + 1 < len(lives):
                end = max(begin, min(end, lives[k + 1].start_ns))
            if begin > reached_ns or k == 0:
                self._between(k, reached_ns, begin, widths)
            self._during(k, begin, end, widths, statistics)
            reached_ns = end
        arrays = Segments.joined(self._segments)
        paid_ns = sum(count * (stop - begin) for begin, stop, count in widths)
        return Account(
            start_ns=start_ns,
            end_ns=reached_ns,
            paid_ns=paid_ns,
            widths=tuple(widths),
            segments=arrays,
            labels=tuple(self._labels),
            committed=self._lineage.committed,
            steps=statistics,
            saves=tuple(self._saves()),
            failures=tuple(self._failures(arrays)),
            undone=self._undone_work(),
            attempts=tuple(self._summaries()),
            arrivals=self._arrivals,
            restores=tuple(self._restores()),
            collectives=self._collectives(),
        )

    # -- when ------------------------------------------------------------------------------------------------------

    def _find_lives(self, now_ns: int | None) -> list[Life]:
        found = []
        for k, attempt in enumerate(self._attempts):
            is_last = k == len(self._attempts) - 1
            painted = dict(zip(sorted(attempt.tracks), self._painted[k], strict=True))
            found.append(life(attempt, painted, now_ns=now_ns if is_last else None))
        return found

    def _devices(self, at_ns: int, world: int) -> int:
        declared = [count for wall, count in self._declared if wall <= at_ns]
        return max(declared[-1] if declared else 0, world)

    def _widths(self, begin: int, end: int, world: int) -> list[tuple[int, int, int]]:
        edges = sorted({begin, end, *(wall for wall, _ in self._declared if begin < wall < end)})
        return [(a, b, self._devices(a, world)) for a, b in itertools.pairwise(edges)]

    # -- segments --------------------------------------------------------------------------------------------------

    def _label(self, text: str) -> int:
        return self._labels.setdefault(text, len(self._labels))

    def _put(self, k: int, device: int, rows: list[tuple[int, int, Category, str]]) -> None:
        kept = [(a, b, int(category), self._label(label)) for a, b, category, label in rows if b > a]
        if kept:
            self._segments.append(Segments.of(k, device, np.array(kept, dtype=np.int64)))

    def _between(self, k: int, begin: int, end: int, widths: list[tuple[int, int, int]]) -> None:
        """The time before attempt ``k``, with the devices of the one before it."""
        if k == 0:
            category, label, world = Category.INIT, "launch", self._world(0)
        else:
            before, here = self._attempts[k - 1], self._attempts[k]
            is_restart = before.launcher == here.launcher != "" and not self._lives[k - 1].is_done
            category, label = (Category.RESTART, "relaunch") if is_restart else (Category.GAP, "down")
            world = self._world(k - 1)
        for a, b, count in self._widths(begin, end, world):
            widths.append((a, b, count))
            for device in range(count):
                self._put(k, device, [(a, b, category, label)])

    def _world(self, k: int) -> int:
        return max(self._attempts[k].world, len(self._tracks[k]))

    def _during(self, k: int, begin: int, end: int, widths: list[tuple[int, int, int]], stats: StepStatistics) -> None:
        world = self._world(k)
        here = self._widths(begin, end, world)
        widths += here
        for a, b, count in here:
            for device in range(world, count):
                self._put(k, device, [(a, b, Category.GAP, "no rank")])
        wait_ns, places = waits([track.rank for track in self._tracks[k]], self._painted[k], self._arrivals)
        hang_ns, warm_ns = self._hangs(k, wait_ns, places)
        for t, paint in enumerate(self._painted[k]):
            pieces = paint.pieces(wait_ns[t], hang_ns[t], warm_ns[t])
            self._device(k, t, pieces, begin, end)
            is_kept = self._lineage.fates[k][t][pieces.step] == Fate.KEPT
            stats.kept_ns += int(_spans(pieces, begin, end)[is_kept].sum())
            stats.add(paint, self._lineage.fates[k][t], wait_ns[t] + hang_ns[t])
        for device in range(len(self._tracks[k]), world):
            self._put(k, device, [(begin, end, Category.OTHER, "nothing recorded")])

    def _hangs(self, k: int, wait_ns: list[np.ndarray], places: Places) -> tuple[list[np.ndarray], list[int]]:
        """Time that each step hung, and what the first took beyond the usual; waiting for a hung rank is hanging."""
        hang_ns, warm_ns = [], []
        for paint, wait in zip(self._painted[k], wait_ns, strict=True):
            own = np.maximum(paint.busy_ns() - wait, 0)
            hang, warm = np.zeros_like(own), 0
            if len(own) >= MIN_STEPS_FOR_HANG:
                usual = median_ns(own)
                excess = own - usual
                is_hung = (own >= HANG_FACTOR * usual) & (excess >= HANG_MIN_NS)
                hang = np.where(is_hung, excess, 0)
                warm, hang[0] = int(hang[0]), 0
            hang_ns.append(hang)
            warm_ns.append(warm)
        if any(hang.any() for hang in hang_ns):
            hang, wait = (np.concatenate(parts)[places.order] for parts in (hang_ns, wait_ns))
            worst = np.repeat(np.maximum.reduceat(hang, places.starts), places.counts)
            moved = np.empty_like(wait)
            moved[places.order] = np.minimum(wait, worst)
            for t, part in enumerate(np.split(moved, places.edges)):
                hang_ns[t] = hang_ns[t] + part
                wait_ns[t] = wait_ns[t] - part
        return hang_ns, warm_ns

    def _device(self, k: int, t: int, pieces: Pieces, begin: int, end: int) -> None:
        paint = self._painted[k][t]
        fates = self._lineage.fates[k][t]
        start_up = Category.INIT if k == 0 else Category.RESTART
        categories = _FATED[pieces.part, fates[pieces.step]]
        part_labels = np.array([self._label(part.name.lower()) for part in Part], dtype=np.int32)
        marks = [(m.start_ns, m.end_ns, int(m.category), self._label(m.label)) for m in paint.marks]
        columns = [pieces.start_ns, pieces.end_ns, categories, part_labels[pieces.part]]
        if marks:
            more = np.array(marks, dtype=np.int64)
            columns = [np.concatenate([column, more[:, i].astype(column.dtype)]) for i, column in enumerate(columns)]
            order = np.argsort(columns[0], kind="stable")
            columns = [column[order] for column in columns]
        starts, ends = np.clip(columns[0], begin, end), np.clip(columns[1], begin, end)
        is_there = ends > starts
        starts, ends, categories = starts[is_there], ends[is_there], columns[2][is_there]
        categories[categories == Category.INIT] = start_up
        self._segments.append(Segments.of_columns(k, t, (starts, ends, categories, columns[3][is_there])))
        self._count_undone(k, t, pieces, begin, end)
        first_step_ns = int(paint.start_ns[0]) if len(paint.start_ns) else end
        head_ns = min(max(begin, first_step_ns), end)
        reached = int(ends[-1]) if len(ends) else begin
        befores, behinds = np.append(begin, ends), np.append(starts, reached)
        is_gap = behinds > befores
        gaps = np.stack((befores[is_gap], behinds[is_gap]), axis=1)
        inside: list[tuple[int, int, Category, str]] = []
        for a, b in gaps.tolist():
            inside += self._head(paint, start_up, a, min(b, head_ns)) if a < head_ns else []
            if b > head_ns:
                inside.append((max(a, head_ns), b, Category.OTHER, "between steps"))
        self._put(k, t, inside)
        self._put(k, t, self._tail(k, paint, start_up, reached, end))

    def _head(self, paint: Painted, start_up: Category, a: int, b: int) -> list[tuple[int, int, Category, str]]:
        """Before the first step: launch, imports, set-up."""
        process_ns, run_ns = paint.first_ns, paint.run_ns
        cuts = [a, min(max(process_ns, a), b), min(max(run_ns, process_ns, a), b), b]
        names = ("launch", "imports", "setup")
        return [(x, y, start_up, name) for x, y, name in zip(cuts, cuts[1:], names, strict=False)]

    def _tail(
        self, k: int, paint: Painted, start_up: Category, reached: int, end: int
    ) -> list[tuple[int, int, Category, str]]:
        """Behind the last thing that this rank did."""
        if reached >= end:
            return []
        here = self._lives[k]
        has_steps = bool(len(paint.start_ns))
        under_way, name = (Category.LOST, "step under way") if has_steps else (start_up, "setup")
        phase, phase_ns = paint.open_phase or ("", end)
        phase_ns = min(max(phase_ns, reached), end)
        cuts: list[tuple[int, Category, str]]
        if here.is_done:
            own_end = paint.end[0] if paint.end is not None else end
            cuts = [(own_end, Category.OTHER, "after the last step"), (end, Category.OTHER, "other ranks end")]
        elif here.is_live:
            if has_steps:
                under_way, name = Category.PROVISIONAL, "step under way"
            alive_ns = max(reached, paint.last_ns) + self._silence_ns
            cuts = [(alive_ns, under_way, name), (end, Category.DETECT, "silent")]
        else:
            died, declared = here.died_ns, here.declared_ns
            if paint.end is not None and paint.end[1] == "done":
                under_way, name, died = Category.OTHER, "after the last step", max(died, paint.end[0])
            cuts = [
                (died, under_way, name),
                (declared, Category.DETECT, "detection"),
                (end, Category.SPIN, "spin"),
            ]
        rows: list[tuple[int, int, Category, str]] = []
        for i, (edge, category, label) in enumerate(cuts):
            until = min(max(edge, reached), end) if i < len(cuts) - 1 else end
            if i == 0 and phase and until > phase_ns:
                rows.append((reached, phase_ns, category, label))
                named = phase_category(phase)
                rows.append((phase_ns, until, start_up if named is Category.INIT else named, phase))
            elif i == 0 and category is start_up:
                rows += self._head(paint, start_up, reached, until)
            else:
                rows.append((reached, until, category, label))
            reached = until
        return rows

    # -- what else is known ----------------------------------------------------------------------------------------

    def _count_undone(self, k: int, t: int, pieces: Pieces, begin: int, end: int) -> None:
        fates, undoers = self._lineage.fates[k][t], self._lineage.undone_by[k][t]
        is_lost = (fates[pieces.step] == Fate.LOST) & (pieces.part != Part.WARMUP)
        spans = _spans(pieces, begin, end)
        for undoer in np.unique(undoers[pieces.step][is_lost]).tolist():
            chosen = is_lost & (undoers[pieces.step] == undoer)
            self._undone[undoer if undoer >= 0 else -1 - k] += int(spans[chosen].sum())

    def _undone_work(self) -> UndoneWork:
        rollbacks = sum(amount for key, amount in self._undone.items() if key < 0)
        return UndoneWork(
            rollback_ns=rollbacks,
            resume_ns={key: amount for key, amount in self._undone.items() if key >= 0},
        )

    def _saves(self) -> list[Save]:
        begun: dict[tuple[int, str], dict[int, tuple[int, int]]] = {}  # by the rank's place: when, and the step
        staged: dict[tuple[int, str], int] = {}
        ended: dict[tuple[int, str], tuple[int, bool, int, int]] = {}
        for k, tracks in enumerate(self._tracks):
            for t, track in enumerate(tracks):
                offset_ns = self._painted[k][t].offset_ns
                for _, event in sorted(track.others.items()):
                    now_ns = event.mono_ns + offset_ns  # the wall clock may be set back during a save
                    match event:
                        case events.CkptBegin():
                            own = begun.setdefault((k, event.ckpt), {})
                            own[t] = min(own.get(t, (now_ns, event.step)), (now_ns, event.step))
                        case events.CkptStaged():
                            key = (k, event.ckpt)
                            staged[key] = max(staged.get(key, 0), nanoseconds(event.stall_s))
                        case events.CkptCommit():
                            key = (k, event.ckpt)
                            if key not in ended or not ended[key][1] or now_ns < ended[key][0]:
                                ended[key] = (now_ns, True, event.bytes, t)
                        case events.CkptFail():
                            ended.setdefault((k, event.ckpt), (now_ns, False, 0, t))
                        case _:
                            pass
        found = []
        for key, own in begun.items():
            begin_ns, step = min(own.values())
            end = ended.get(key)
            if end is not None:
                # Begin and end on the clock of one rank, if it told of both: those of two differ.
                begin_ns, step = own.get(end[3], (min(begin_ns, end[0]), step))
            found.append(
                Save(
                    ckpt=key[1],
                    step=step,
                    begin_ns=begin_ns,
                    stall_ns=staged.get(key, 0),
                    end_ns=None if end is None else max(end[0], begin_ns),
                    is_committed=end is not None and end[1],
                    size_bytes=0 if end is None else end[2],
                )
            )
        return sorted(found, key=lambda save: (save.begin_ns, save.ckpt))

    def _collectives(self) -> dict[str, Durations]:
        found: dict[str, Durations] = {}
        for tracks in self._tracks:
            for track in tracks:
                for event in track.others.values():
                    if isinstance(event, events.Collectives):
                        part = Durations(counts=Counter(event.hist), top=list(event.top))
                        found.setdefault(event.op, Durations()).merge(part)
        return found

    def _restores(self) -> list[tuple[int, str, tuple[tuple[str, str], ...]]]:
        found = []
        for tracks in self._tracks:
            for track in tracks[:1]:
                for _, event in sorted(track.others.items()):
                    if isinstance(event, events.Restore):
                        found.append((event.step, event.ckpt, event.skipped))
        return found

    def _failures(self, arrays: Segments) -> list[Failure]:
        found = []
        for k, here in enumerate(self._lives):
            if here.is_done or here.is_live:
                continue
            mine = arrays.of_attempt(k)
            under_way = self._labels.get("step under way", -1)
            partial_ns = mine.total((mine.category == Category.LOST) & (mine.label == under_way))
            lost_ns = partial_ns + self._undone.get(k + 1, 0)
            found.append(
                Failure(
                    attempt=self._attempts[k].name,
                    at_ns=here.died_ns,
                    cause=here.cause,
                    rank=here.first_rank,
                    lost_ns=lost_ns,
                    detect_ns=mine.total(mine.category == Category.DETECT),
                    spin_ns=mine.total(mine.category == Category.SPIN),
                    stages=self._stages(k, arrays),
                )
            )
        return found

    def _stages(self, k: int, arrays: Segments) -> tuple[tuple[str, int], ...]:
        """From the death to the end of the slowest rank's first new step, on that rank's device."""
        if k + 1 >= len(self._lives):
            return ()
        firsts = [(int(p.end_ns[0]), t) for t, p in enumerate(self._painted[k + 1]) if len(p.end_ns)]
        if not firsts:
            return ()
        until_ns, device = max(firsts)
        if until_ns <= self._lives[k].died_ns:  # clocks of two nodes that differ
            return ()
        window = arrays.clipped(self._lives[k].died_ns, until_ns).of_device(device)
        labels = tuple(self._labels)
        stages: dict[str, int] = {}
        for i in np.argsort(window.start_ns, kind="stable").tolist():
            name = labels[int(window.label[i])]
            if window.attempt[i] > k and name in ("compute", "fetch", "wait", "hang", "warmup"):
                name = "first batch" if name == "fetch" else "first step"
            elif window.attempt[i] == k and name not in ("detection", "spin"):
                name = "detection"  # a survivor that still computed after the first rank had died
            stages[name] = stages.get(name, 0) + int(window.end_ns[i] - window.start_ns[i])
        return tuple(stages.items())

    def _summaries(self) -> list[AttemptSummary]:
        found = []
        for k, here in enumerate(self._lives):
            numbers = [paint.step_numbers for paint in self._painted[k] if len(paint.step_numbers)]
            found.append(
                AttemptSummary(
                    name=self._attempts[k].name,
                    world=self._world(k),
                    start_ns=here.start_ns,
                    end_ns=here.end_ns,
                    first_step=min((int(n[0]) for n in numbers), default=0),
                    last_step=max((int(n[-1]) for n in numbers), default=0),
                    end="done" if here.is_done else "under way" if here.is_live else here.cause,
                )
            )
        return found


def _spans(pieces: Pieces, begin: int, end: int) -> np.ndarray:
    """How much of each piece lies in ``[begin, end)``; attempts may overlap, and the later one is paid for."""
    found: np.ndarray = np.clip(pieces.end_ns, begin, end) - np.clip(pieces.start_ns, begin, end)
    return found
