"""An account: where every paid device-second went, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cacheloader.goodput.categories import Category, Fate
from cacheloader.goodput.stragglers import LastArrivals
from cacheloader.goodput.track import median_ns

if TYPE_CHECKING:
    from cacheloader.goodput.histogram import Durations
    from cacheloader.goodput.track import Painted


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Pieces of the time of devices: arrays of one length. Those of one device do not overlap.

    Attributes:
        attempt: Index of the attempt, or of the one that follows.
        device: Index of the device; ranks first.
        start_ns: Wall clock.
        end_ns: Wall clock.
        category: A ``Category``.
        label: Index into ``Account.labels``.
    """

    attempt: np.ndarray
    device: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    category: np.ndarray
    label: np.ndarray

    @classmethod
    def of(cls, attempt: int, device: int, rows: np.ndarray) -> Self:
        """Rows of start, end, category and label of one device."""
        # Copies: the whole rows would stay in memory.
        return cls.of_columns(attempt, device, (rows[:, 0].copy(), rows[:, 1].copy(), rows[:, 2], rows[:, 3].copy()))

    @classmethod
    def of_columns(
        cls, attempt: int, device: int, columns: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    ) -> Self:
        """The same as columns; all but the times become as narrow as they can be: there may be millions of rows."""
        start_ns, end_ns, category, label = columns
        size = len(start_ns)
        return cls(
            attempt=np.full(size, attempt, dtype=_type_of(attempt)),
            device=np.full(size, device, dtype=_type_of(device)),
            start_ns=start_ns,
            end_ns=end_ns,
            category=category.astype(np.int8, copy=False),
            label=label.astype(_type_of(int(label.max())) if size else np.int8, copy=False),
        )

    @classmethod
    def joined(cls, parts: list[Segments]) -> Self:
        """All of them; ``parts`` is empty afterwards, since there may be millions."""
        columns = {name: [getattr(part, name) for part in (_NO_SEGMENTS, *parts)] for name in cls.__slots__}
        parts.clear()
        return cls(**{name: np.concatenate(columns.pop(name)) for name in cls.__slots__})

    def where(self, chosen: np.ndarray) -> Segments:
        """Those that are chosen."""
        return Segments(**{name: getattr(self, name)[chosen] for name in self.__slots__})

    def of_attempt(self, index: int) -> Segments:
        """Those of one attempt and of the time before it."""
        return self.where(self.attempt == index)

    def of_device(self, index: int) -> Segments:
        """Those of one device."""
        return self.where(self.device == index)

    def clipped(self, start_ns: int, end_ns: int) -> Segments:
        """What lies in ``[start_ns, end_ns)``."""
        chosen = self.where((self.end_ns > start_ns) & (self.start_ns < end_ns))
        values = {name: getattr(chosen, name) for name in self.__slots__}
        values["start_ns"] = np.maximum(chosen.start_ns, start_ns)
        values["end_ns"] = np.minimum(chosen.end_ns, end_ns)
        return Segments(**values)

    def total(self, chosen: np.ndarray) -> int:
        """Device-nanoseconds of those that are chosen; exact, however many devices there are."""
        spans = (self.end_ns - self.start_ns)[chosen]
        return sum(int(spans[i : i + 2**20].sum()) for i in range(0, len(spans), 2**20))

    def totals(self) -> dict[Category, int]:
        """Device-nanoseconds by category."""
        found = dict.fromkeys(Category, 0)
        for totals in self.totals_by_device().values():
            for category, amount in totals.items():
                found[category] += amount
        return found

    def totals_by_device(self) -> dict[int, dict[Category, int]]:
        """Device-nanoseconds by category, of each device."""
        spans = self.end_ns - self.start_ns
        found: dict[int, dict[Category, int]] = {}
        edges = (1 + np.flatnonzero(self.device[1:] != self.device[:-1])).tolist()  # devices come in long stretches
        for begin, end in pairwise([0, *edges, len(spans)] if len(spans) else []):
            own = found.setdefault(int(self.device[begin]), dict.fromkeys(Category, 0))
            # A sum of floats would not be exact; one device's nanoseconds fit 64 bits for 292 years.
            sums = np.zeros(len(Category), dtype=np.int64)
            if end - begin < 64:
                np.add.at(sums, self.category[begin:end], spans[begin:end])
            else:
                for category in Category:
                    sums[category] = spans[begin:end][self.category[begin:end] == category].sum()
            for category in Category:
                own[category] += int(sums[category])
        return found


def _type_of(most: int) -> type[np.signedinteger[Any]]:
    return next(kind for kind in (np.int8, np.int16, np.int32, np.int64) if most <= np.iinfo(kind).max)


_NO_SEGMENTS = Segments.of(0, 0, np.zeros((0, 4), dtype=np.int64))


@dataclass(slots=True, kw_only=True)
class StepStatistics:
    """What is known of steps, over all ranks and attempts.

    Attributes:
        tokens_issued: Of all completed steps.
        tokens_kept: Of those kept.
        samples_issued: Likewise.
        samples_kept: Likewise.
        kept_ns: Paid device time inside kept steps, fetch included.
        rows: Of each rank and attempt, which steps were kept, and its steps.
        idle_ns: Likewise, how long each step waited for slower ranks or hung.
    """

    tokens_issued: int = 0
    tokens_kept: int = 0
    samples_issued: int = 0
    samples_kept: int = 0
    kept_ns: int = 0
    rows: list[tuple[np.ndarray, Painted]] = field(default_factory=list)
    idle_ns: list[np.ndarray] = field(default_factory=list)

    def add(self, paint: Painted, fates: np.ndarray, idle_ns: np.ndarray) -> None:
        """Count one rank in one attempt."""
        is_kept = fates == Fate.KEPT
        tokens, samples = paint.table.column(7), paint.table.column(8)
        self.tokens_issued += int(tokens.sum())
        self.tokens_kept += int(tokens[is_kept].sum())
        self.samples_issued += int(samples.sum())
        self.samples_kept += int(samples[is_kept].sum())
        self.rows.append((is_kept, paint))
        self.idle_ns.append(idle_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One checkpoint.

    Attributes:
        ckpt: Its name.
        step: What it holds.
        begin_ns: When the training thread began with it.
        stall_ns: How long the training thread stood still, on the slowest rank.
        end_ns: When it was seen to be durable, or to have failed; ``None``: neither.
        is_committed: Whether it became durable.
        size_bytes: Its size, 0 if nobody said.
    """

    ckpt: str
    step: int
    begin_ns: int
    stall_ns: int
    end_ns: int | None
    is_committed: bool
    size_bytes: int

    @property
    def lag_ns(self) -> int | None:
        """From its begin to durable."""
        return self.end_ns - self.begin_ns if self.is_committed and self.end_ns is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One attempt that did not end by itself.

    Attributes:
        attempt: Which.
        at_ns: When the first rank died or stopped to move.
        cause: What is known of it.
        rank: Which rank it began with, -1 if unknown.
        lost_ns: Device time of undone steps and of the one under way.
        detect_ns: Device time until something reacted.
        spin_ns: Device time from there until the last process was gone.
        stages: From the death to the first new step: (stage, nanoseconds), in order; empty if none followed.
    """

    attempt: str
    at_ns: int
    cause: str
    rank: int
    lost_ns: int
    detect_ns: int
    spin_ns: int
    stages: tuple[tuple[str, int], ...]

    @property
    def recovery_ns(self) -> int | None:
        """Time to recover, ``None`` if that did not happen."""
        return sum(amount for _, amount in self.stages) if self.stages else None


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoneWork:
    """Device time of completed steps that were undone.

    Attributes:
        rollback_ns: By rollbacks on purpose.
        resume_ns: By the resume of an attempt (its index) behind them.
    """

    rollback_ns: int
    resume_ns: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSummary:
    """One launch.

    Attributes:
        name: Of the launch.
        world: Ranks.
        start_ns: First sign of life.
        end_ns: Last one.
        first_step: First step that it completed, 0 for none.
        last_step: Last one.
        end: ``"done"``, ``"under way"`` or what went wrong.
    """

    name: str
    world: int
    start_ns: int
    end_ns: int
    first_step: int
    last_step: int
    end: str


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the paid time went.

    Attributes:
        start_ns: When the run began, on the wall clock.
        end_ns: When it ended, or now.
        paid_ns: Device-nanoseconds paid for.
        widths: Spans of time with the number of devices: (start, end, devices).
        segments: What every device did.
        labels: Names of stages and phases, see ``Segments.label``.
        committed: The last step that is safe.
        steps: What is known of steps.
        saves: Checkpoints, oldest first.
        failures: Attempts that did not end by themselves.
        undone: Work that was undone.
        attempts: All launches.
        arrivals: Who was waited for.
        restores: (step, checkpoint, newer ones that were skipped with the reason).
        collectives: By kind, how long each took on each rank.
    """

    start_ns: int
    end_ns: int
    paid_ns: int
    widths: tuple[tuple[int, int, int], ...]
    segments: Segments
    labels: tuple[str, ...]
    committed: int
    steps: StepStatistics
    saves: tuple[Save, ...]
    failures: tuple[Failure, ...]
    undone: UndoneWork
    attempts: tuple[AttemptSummary, ...]
    arrivals: LastArrivals
    restores: tuple[tuple[int, str, tuple[tuple[str, str], ...]], ...]
    collectives: dict[str, Durations]

    @classmethod
    def empty(cls) -> Self:
        """Of no events."""
        return cls(
            start_ns=0, end_ns=0, paid_ns=0, widths=(), segments=Segments.joined([]), labels=(), committed=0,
            steps=StepStatistics(), saves=(), failures=(), undone=UndoneWork(rollback_ns=0, resume_ns={}), attempts=(),
            arrivals=LastArrivals(), restores=(), collectives={},
        )  # fmt: skip

    @cached_property
    def totals(self) -> dict[Category, int]:
        """Device-nanoseconds by category; their sum is ``paid_ns``, exactly."""
        return self.segments.totals()

    @property
    def wall_ns(self) -> int:
        """From begin to end."""
        return self.end_ns - self.start_ns

    @property
    def goodput_time(self) -> float:
        """Kept computing as a part of what was paid."""
        return self.totals[Category.COMPUTE] / self.paid_ns if self.paid_ns else 0.0

    def window(self, start_ns: int, end_ns: int) -> dict[Category, int]:
        """Device-nanoseconds by category in ``[start_ns, end_ns)``; sums of disjoint windows are exact."""
        return self.segments.clipped(start_ns, end_ns).totals()

    def paid_in(self, start_ns: int, end_ns: int) -> int:
        """Device-nanoseconds paid for in ``[start_ns, end_ns)``."""
        return sum(count * max(0, min(b, end_ns) - max(a, start_ns)) for a, b, count in self.widths)

    @cached_property
    def _kept(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every rank's kept steps: number, and time without marks inside (fetch included)."""
        numbers = [paint.step_numbers[is_kept] for is_kept, paint in self.steps.rows]
        spans = [(paint.busy_ns() + paint.fetch_ns())[is_kept] for is_kept, paint in self.steps.rows]
        empty = np.zeros(0, dtype=np.int64)
        return np.concatenate([empty, *numbers]), np.concatenate([empty, *spans])

    @property
    def kept_step_ns(self) -> int:
        """Device time of kept steps: computing, fetching, waiting; what was paid for, each instant of a device once."""
        return self.steps.kept_ns

    @property
    def kept_share(self) -> float:
        """That as a part of what was paid."""
        return self.kept_step_ns / self.paid_ns if self.paid_ns else 0.0

    @property
    def reference_step_ns(self) -> int:
        """The median kept step."""
        return median_ns(self._kept[1])

    @property
    def goodput_work(self) -> float:
        """Kept work as a part of what the same devices would have done at the reference step time, uninterrupted."""
        return len(self._kept[0]) * self.reference_step_ns / self.paid_ns if self.paid_ns else 0.0

    @property
    def useful_tokens_per_hour(self) -> float:
        """Kept tokens in an hour of wall time."""
        return self.steps.tokens_kept * 3600e9 / self.wall_ns if self.wall_ns else 0.0

    @property
    def useful_samples_per_hour(self) -> float:
        """Kept samples in an hour of wall time."""
        return self.steps.samples_kept * 3600e9 / self.wall_ns if self.wall_ns else 0.0
