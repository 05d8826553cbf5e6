"""Which shards of a data set stay while it is read again and again: a set that is spread evenly over every epoch.

Who reads a data set larger than the cache once an epoch, in an order of each epoch's own, can hit no more than what
the cache holds, whatever is kept. Which shards are kept decides *when* the hits come. By next use they would all come
at the start of an epoch, and then the link would have to carry everything at the full pace; a set chosen by hash is
met evenly, and a link that carries the missing part is enough. Where several jobs read the same shards, the next use
decides instead: one fetch then serves them all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from cacheloader_daemon.plan.accesses import AccessTable

SHARED = 1.25
"""From how many times their union the plans' bytes on count as shared: ranks whose lanes meet inside a shard share a
few, two jobs over one data set share all."""


def is_same_scan(one: AccessTable, other: AccessTable) -> bool:
    """Whether two plans are parts of one reading: they agree on all rows that both know.

    So do the plans of one rank's workers where some have begun the next epoch already.
    """
    if not one.num_accesses or not other.num_accesses:
        return False
    # An access under way begins at the first row of a plan, wherever it began in an earlier one.
    begin = max(int(one.first_clock[0]), int(other.first_clock[0]))
    end = min(int(one.first_clock[-1]), int(other.first_clock[-1]))
    parts = [slice(table.num_begun(begin), table.num_begun(end)) for table in (one, other)]
    (shard, first), (other_shard, other_first) = (
        (table.shard[part], table.first_clock[part]) for table, part in zip((one, other), parts, strict=True)
    )
    return bool(len(shard) and np.array_equal(shard, other_shard) and np.array_equal(first, other_first))


class _Heads:
    """The first plan of each reading, found by an access that every other plan of it has to share with it.

    That is the last one that both know: the last one of the plan that ends first. So a plan is compared in full with
    those alone that have it too, and not with all that there are.

    Args:
        tables: All plans that heads are looked for.
    """

    def __init__(self, tables: Iterable[AccessTable]) -> None:
        self._ends = sorted({int(table.first_clock[-1]) for table in tables if table.num_accesses})
        self._ending: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        """By a row and the access there: heads whose last one it is."""
        self._going_on: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        """Likewise, heads that have more after it."""

    def add(self, number: int, table: AccessTable) -> None:
        """One more head."""
        for edge in self._edges(table):
            heads = self._ending if edge[0] == table.first_clock[-1] else self._going_on
            heads[edge].append(number)

    def candidates(self, table: AccessTable) -> list[int]:
        """Numbers of the heads with which ``table`` may agree, in their order; it agrees with none besides."""
        edges = self._edges(table)
        found = [number for edge in edges for number in self._ending.get(edge, ())]
        return sorted(found + self._going_on.get(edges[-1], [])) if edges else []

    def _edges(self, table: AccessTable) -> list[tuple[int, int, int]]:
        """Of each row at which some plan ends: it, and the last access of ``table`` that has begun by then."""
        ends = self._ends[: bisect_right(self._ends, int(table.first_clock[-1]))] if table.num_accesses else []
        begun = [(end, table.num_begun(end)) for end in ends]
        return [(end, table.first_of(count - 1), table.shard_of(count - 1)) for end, count in begun if count]


def scans(tables: Sequence[AccessTable]) -> list[NDArray[np.bool_]]:
    """The shards that each separate reading uses.

    Args:
        tables: Different plans over one data set.

    Returns:
        A bool [num_shards] for each reading.
    """
    groups: list[list[AccessTable]] = []
    heads = _Heads(tables)
    for table in tables:
        number = next((number for number in heads.candidates(table) if is_same_scan(groups[number][0], table)), None)
        if number is None:
            heads.add(len(groups), table)
            groups.append([table])
        else:
            groups[number].append(table)
    return [np.logical_or.reduce([table.used for table in group]) for group in groups]


def union(used: Sequence[NDArray[np.bool_]], reserve_bytes: NDArray[np.int64]) -> tuple[NDArray[np.bool_], bool]:
    """The shards that any reading uses, and whether the readings share them."""
    together = np.logical_or.reduce(used)
    sum_bytes = sum(int(reserve_bytes[part].sum()) for part in used)
    return together, sum_bytes > SHARED * int(reserve_bytes[together].sum())


def chosen(
    used: NDArray[np.bool_], *, rank: NDArray[np.int64], reserve_bytes: NDArray[np.int64], budget_bytes: int
) -> NDArray[np.bool_]:
    """The shards to keep: of those that are used the first by hash, as many as the budget holds.

    A larger budget keeps what a smaller one does.

    Args:
        used: bool [num_shards].
        rank: int64 [num_shards]; the shards in the order of their hashes.
        reserve_bytes: int64 [num_shards].
        budget_bytes: Bound of their reservations.
    """
    in_order = rank[used[rank]]
    fits = np.searchsorted(np.cumsum(reserve_bytes[in_order]), budget_bytes, side="right")
    kept = np.zeros(len(used), dtype=bool)
    kept[in_order[:fits]] = True
    return kept
