"""Which shards of a data set stay while it is read again and again: a set that is spread evenly over every epoch.

Who reads a data set larger than the cache once an epoch, in an order of each epoch's own, can hit no more than what
the cache holds, whatever is kept. Which shards are kept decides *when* the hits come. By next use they would all come
at the start of an epoch, and then the link would have to carry everything at the full pace; a set chosen by hash is
met evenly, and a link that carries the missing part is enough. Where several jobs read the same shards, the next use
decides instead: one fetch then serves them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cacheloader_daemon.plan.accesses import AccessTable

SHARED = 1.25
"""From how many times their union the plans' bytes on count as shared: ranks whose lanes meet inside a shard share a
few, two jobs over one data set share all."""

_GLANCE = 8
"""Accesses compared before all are: plans that differ mostly differ at once."""


def is_same_scan(one: AccessTable, other: AccessTable) -> bool:
    """Whether two plans are parts of one reading: they agree on all rows that both know.

    So do the plans of one rank's workers where some have begun the next epoch already.
    """
    if not one.num_accesses or not other.num_accesses:
        return False
    # An access under way begins at the first row of a plan, wherever it began in an earlier one.
    begin = max(int(one.first_clock[0]), int(other.first_clock[0]))
    end = min(int(one.first_clock[-1]), int(other.first_clock[-1]))
    parts = []
    for table in (one, other):
        bounds = np.searchsorted(table.first_clock, [begin, end], side="right")
        parts.append((table.shard[bounds[0] : bounds[1]], table.first_clock[bounds[0] : bounds[1]]))
    (shard, first), (other_shard, other_first) = parts
    if not len(shard) or len(shard) != len(other_shard):
        return False
    return bool(
        np.array_equal(shard[:_GLANCE], other_shard[:_GLANCE])
        and np.array_equal(shard, other_shard)
        and np.array_equal(first, other_first)
    )


def scans(tables: Sequence[AccessTable]) -> list[NDArray[np.bool_]]:
    """The shards that each separate reading uses.

    Args:
        tables: Different plans over one data set.

    Returns:
        A bool [num_shards] for each reading.
    """
    groups: list[list[AccessTable]] = []
    for table in tables:
        group = next((group for group in groups if is_same_scan(group[0], table)), None)
        if group is None:
            groups.append([table])
        else:
            group.append(table)
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
