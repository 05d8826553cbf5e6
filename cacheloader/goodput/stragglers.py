"""Who was waited for. Everybody leaves a collective together, so the shortest stay marks the last to arrive.

No clocks are compared, and nothing is sent between the ranks: each writes how long its own collectives took.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheloader.goodput.track import Painted, Track

NOTABLE_SHARE = 0.05
"""A last arriver counts in the ranking if the others waited this part of the step for it: somebody is always last."""


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
    """

    num_steps: int = 0
    num_notable: int = 0
    last: Counter[int] = field(default_factory=Counter)
    caused_ns: Counter[int] = field(default_factory=Counter)
    fetch_ns: Counter[int] = field(default_factory=Counter)
    sources: dict[int, Counter[str]] = field(default_factory=dict)


def waits(
    tracks: Sequence[Track], painted: Sequence[Painted], arrivals: LastArrivals
) -> tuple[list[np.ndarray], dict[tuple[int, int], list[tuple[int, int]]]]:
    """How long each rank waited for others in each step of one attempt.

    Args:
        tracks: The attempt's ranks.
        painted: The same, in order.
        arrivals: Who came last is added to it.

    Returns:
        For each track the wait of each step in nanoseconds; and for each step (number and how often it came before)
        where it is found: pairs of track and row.
    """
    result = [np.maximum(paint.table[:, 6], 0) for paint in painted]
    places: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for t, paint in enumerate(painted):
        seen: Counter[int] = Counter()
        for row, number in enumerate(paint.step_numbers.tolist()):
            places.setdefault((number, seen[number]), []).append((t, row))
            seen[number] += 1
    for found in places.values():
        stays = []
        for t, row in found:
            stay = tracks[t].collectives.get(int(painted[t].table[row, 0]))
            if stay is not None:
                stays.append((t, row, stay))
        if len(stays) < 2:
            continue
        depth = min(len(stay) for _, _, stay in stays)
        shortest = [min(stay[i] for _, _, stay in stays) for i in range(depth)]
        own = []
        for t, row, stay in stays:
            wait_ns = 1000 * sum(stay[i] - shortest[i] for i in range(depth))
            if painted[t].table[row, 6] < 0:
                result[t][row] = wait_ns
            own.append((wait_ns, t, row))
        _count(own, tracks, painted, arrivals)
    return result, places


def _count(
    own: list[tuple[int, int, int]], tracks: Sequence[Track], painted: Sequence[Painted], arrivals: LastArrivals
) -> None:
    arrivals.num_steps += 1
    least, last, last_row = min(own)
    caused_ns = sum(wait_ns - least for wait_ns, _, _ in own)
    most_ns = max(own)[0] - least
    dur_ns = int(painted[last].table[last_row, 3])
    if most_ns < NOTABLE_SHARE * dur_ns:
        return
    rank = tracks[last].rank
    arrivals.num_notable += 1
    arrivals.last[rank] += 1
    arrivals.caused_ns[rank] += caused_ns
    fetch_ns = int(painted[last].table[last_row, 4])
    excess = [max(0, fetch_ns - int(painted[t].table[row, 4])) for _, t, row in own if t != last]
    waited = [wait_ns - least for wait_ns, t, _ in own if t != last]
    arrivals.fetch_ns[rank] += sum(min(a, b) for a, b in zip(excess, waited, strict=True))
    source = tracks[last].sources.get(int(painted[last].table[last_row, 0]))
    if source:
        arrivals.sources.setdefault(rank, Counter())[source] += 1
