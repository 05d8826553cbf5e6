"""Who was waited for. Everybody leaves a collective together, so the shortest stay marks the last to arrive.

No clocks are compared, and nothing is sent between the ranks: each writes how long its own collectives took.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Self

import numpy as np

from cacheloader.goodput.track import COLLECTIVES, SOURCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheloader.goodput.track import Painted

NOTABLE_SHARE = 0.05
"""A last arriver counts in the ranking if the others waited this part of the step for it: somebody is always last."""

CHANCE = 1e-3
"""Ranks of equal speed are late by turns, as if drawn by lot. A rank is named if this is the chance, at most, that the
lot lets the others wait so long for any of them, and not before it came last in ``MIN_TIMES`` notable steps."""

MIN_TIMES = 5

ROWS_AT_A_TIME = 2**17


@dataclass(slots=True, kw_only=True)
class LastArrivals:
    """Who came last, over all steps of which two or more ranks wrote down their collectives.

    Attributes:
        num_steps: Such steps.
        num_notable: Those in which the wait was notable.
        last: Rank to the notable steps in which it came last.
        caused_ns: Rank to the time that the others waited for it in them.
        fetch_ns: Rank to the part of that which its own, longer fetch explains.
        sources: Rank to what it waited for in those steps, by count.
        by_lot_ns: Rank to what ``caused_ns`` would be on average if the last one were drawn by lot in each step.
        by_lot_variance: Likewise its variance, in square nanoseconds.
    """

    num_steps: int = 0
    num_notable: int = 0
    last: Counter[int] = field(default_factory=Counter)
    caused_ns: Counter[int] = field(default_factory=Counter)
    fetch_ns: Counter[int] = field(default_factory=Counter)
    sources: dict[int, Counter[str]] = field(default_factory=dict)
    by_lot_ns: dict[int, float] = field(default_factory=dict)
    by_lot_variance: dict[int, float] = field(default_factory=dict)

    def standing_out(self) -> list[int]:
        """Ranks that the others waited for longer than by chance, the worst first; see ``CHANCE``."""
        limit = NormalDist().inv_cdf(1 - CHANCE / max(2, len(self.by_lot_ns)))
        found = [
            rank
            for rank, caused_ns in self.caused_ns.items()
            if self.last[rank] >= MIN_TIMES
            and caused_ns - self.by_lot_ns[rank] >= limit * math.sqrt(self.by_lot_variance[rank])
        ]
        return sorted(found, key=lambda rank: (-self.caused_ns[rank], rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Which rows of the ranks' tables are the same step: equal number, and seen before as often by that rank.

    Attributes:
        order: Rows of all ranks, one rank's behind the other's, so that those of one step lie together.
        starts: Where each step begins in ``order``.
        counts: How many rows it has.
        edges: Where each rank but the first begins, before they are put in order.
    """

    order: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    edges: np.ndarray

    @classmethod
    def of(cls, numbers: Sequence[np.ndarray]) -> Self:
        """Of the step numbers of each rank."""
        together = np.concatenate([np.zeros(0, dtype=np.int64), *numbers])
        before = np.concatenate([np.zeros(0, dtype=np.int64), *(_times_before(own) for own in numbers)])
        order = np.lexsort((before, together)) if before.any() else np.argsort(together, kind="stable")
        together, before = together[order], before[order]
        is_new = np.ones(len(order), dtype=bool)
        is_new[1:] = (np.diff(together) != 0) | (np.diff(before) != 0)
        starts = np.flatnonzero(is_new)
        return cls(
            order=order,
            starts=starts,
            counts=np.diff(np.append(starts, len(order))),
            edges=np.cumsum([len(own) for own in numbers], dtype=np.int64)[:-1],
        )


def waits(ranks: Sequence[int], painted: Sequence[Painted], arrivals: LastArrivals) -> tuple[list[np.ndarray], Places]:
    """How long each rank waited for others in each step of one attempt.

    Args:
        ranks: The attempt's ranks.
        painted: What each of them did.
        arrivals: Who came last is added to it.

    Returns:
        For each rank the wait of each step in nanoseconds; and where each step is found.
    """
    result = [np.maximum(paint.table.column(6), 0) for paint in painted]
    places = Places.of([paint.step_numbers for paint in painted])
    if not len(places.order):
        return result, places
    told = _Told.of(ranks, painted)
    flat = np.concatenate(result)
    last = len(places.starts)
    step = max(1, last * ROWS_AT_A_TIME // len(places.order))  # the arrays in between shall be small
    for first in range(0, last, step):
        _infer(told, places, slice(first, min(first + step, last)), flat, arrivals)
    return np.split(flat, places.edges), places


@dataclass(frozen=True, slots=True)
class _Told:
    """What the ranks of one attempt wrote down, one behind the other: a row is an index into all of them."""

    ranks: Sequence[int]
    painted: Sequence[Painted]
    begins: np.ndarray
    stays_begin: np.ndarray
    stays: np.ndarray
    collectives: np.ndarray
    dur_ns: np.ndarray
    exposed_ns: np.ndarray
    is_inferred: np.ndarray

    @classmethod
    def of(cls, ranks: Sequence[int], painted: Sequence[Painted]) -> Self:
        def column(index: int) -> np.ndarray:
            return np.concatenate([paint.table.column(index) for paint in painted])

        return cls(
            ranks=ranks,
            painted=painted,
            begins=np.cumsum([0, *(len(paint.table) for paint in painted)]),
            stays_begin=np.cumsum([0, *(len(paint.stays) for paint in painted)]),
            stays=np.concatenate([paint.stays for paint in painted]),
            collectives=column(COLLECTIVES),
            dur_ns=column(3),
            exposed_ns=column(4),
            is_inferred=column(6) < 0,
        )


def _infer(told: _Told, places: Places, steps: slice, flat: np.ndarray, arrivals: LastArrivals) -> None:
    """Put the waits of some steps of ``places`` into ``flat``."""
    counts = places.counts[steps]
    begin = int(places.starts[steps][0])
    rows = places.order[begin : begin + int(counts.sum())]
    collectives = told.collectives[rows]
    step_of = np.repeat(np.arange(len(counts)), counts)
    # Only steps of which two or more ranks wrote down their collectives tell anything.
    writers = np.bincount(step_of[collectives >= 0], minlength=len(counts))
    chosen = (collectives >= 0) & (writers[step_of] >= 2)
    if not chosen.any():
        return
    rows, collectives, counts = rows[chosen], collectives[chosen], writers[writers >= 2]
    starts = np.cumsum(counts) - counts
    track = np.searchsorted(told.begins, rows, side="right") - 1
    offsets = (collectives >> 16) + told.stays_begin[track]
    wait_ns = 1000 * _stayed_longer(told.stays, offsets, collectives & 0xFFFF, starts, counts)
    inferred = told.is_inferred[rows]
    flat[rows[inferred]] = wait_ns[inferred]
    _count(told, arrivals, _Seen(track, rows, wait_ns, starts, counts))


def _times_before(numbers: np.ndarray) -> np.ndarray:
    """How often each number came before."""
    if len(numbers) < 2 or (np.diff(numbers) > 0).all():
        return np.zeros(len(numbers), dtype=np.int64)
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(numbers[order]) != 0))
    counts = np.diff(np.append(starts, len(numbers)))
    found = np.empty(len(numbers), dtype=np.int64)
    found[order] = np.arange(len(numbers)) - np.repeat(starts, counts)
    return found


def _stayed_longer(
    stays: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """How much longer than the shortest each rank stayed in all collectives of a step that all took part in."""
    depth = np.minimum.reduceat(lengths, starts)
    longer = np.zeros(len(offsets), dtype=np.int64)
    for i in range(int(depth.max())):
        stay = stays[offsets + np.minimum(i, lengths - 1)].astype(np.int64)
        shortest = np.minimum.reduceat(stay, starts)
        longer += np.where(np.repeat(depth > i, counts), stay - np.repeat(shortest, counts), 0)
    return longer


@dataclass(frozen=True, slots=True)
class _Seen:
    """Waits of the ranks in steps, those of one step together."""

    track: np.ndarray
    row: np.ndarray
    wait_ns: np.ndarray
    starts: np.ndarray
    counts: np.ndarray


def _count(told: _Told, arrivals: LastArrivals, seen: _Seen) -> None:
    starts, counts = seen.starts, seen.counts
    arrivals.num_steps += len(starts)
    least_ns = np.minimum.reduceat(seen.wait_ns, starts)
    more_ns = seen.wait_ns - np.repeat(least_ns, counts)
    index = np.arange(len(more_ns))
    last = np.minimum.reduceat(np.where(more_ns == 0, index, len(index)), starts)  # of several, the lowest rank
    exposed_ns = told.exposed_ns[seen.row]
    is_notable = np.maximum.reduceat(more_ns, starts) >= NOTABLE_SHARE * told.dur_ns[seen.row[last]]
    caused_ns = np.add.reduceat(more_ns, starts)
    excess_ns = np.maximum(np.repeat(exposed_ns[last], counts) - exposed_ns, 0)
    explained_ns = np.add.reduceat(np.minimum(excess_ns, more_ns), starts)
    arrivals.num_notable += int(is_notable.sum())
    chance = np.repeat(is_notable / counts, counts)
    mean_ns = chance * np.repeat(caused_ns, counts)
    variance = mean_ns * np.repeat(caused_ns, counts) * (1 - chance)
    for t, (own_ns, own) in enumerate(
        zip(np.bincount(seen.track, mean_ns).tolist(), np.bincount(seen.track, variance).tolist(), strict=True)
    ):
        rank = told.ranks[t]
        arrivals.by_lot_ns[rank] = arrivals.by_lot_ns.get(rank, 0.0) + own_ns
        arrivals.by_lot_variance[rank] = arrivals.by_lot_variance.get(rank, 0.0) + own
    for t in np.unique(seen.track[last[is_notable]]).tolist():
        own = is_notable & (seen.track[last] == t)
        rank, paint = told.ranks[t], told.painted[t]
        arrivals.last[rank] += int(own.sum())
        arrivals.caused_ns[rank] += int(caused_ns[own].sum())
        arrivals.fetch_ns[rank] += int(explained_ns[own].sum())
        named, times = np.unique(paint.table.column(SOURCE)[seen.row[last[own]] - told.begins[t]], return_counts=True)
        for name, count in zip(named.tolist(), times.tolist(), strict=True):
            if name >= 0:
                arrivals.sources.setdefault(rank, Counter())[paint.sources[name]] += count
