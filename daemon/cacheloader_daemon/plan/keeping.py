"""Which shards stay from epoch to epoch, over all data sets, and which of them are still to be brought."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from cacheloader_daemon.plan import retention
from cacheloader_daemon.plan.accesses import NEVER
from cacheloader_daemon.plan.horizon import Missing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cacheloader_daemon.plan.catalog import Catalog
    from cacheloader_daemon.plan.horizon import Horizon

FILL_FACTOR = 4
"""Shards that are fetched only to fill the cache, for each one that was read: who looks at three batches of a large
data set has not asked for all of it."""


class Keeping:
    """Chooses, and remembers for which plans it has.

    Args:
        horizon: The plans.

    Attributes:
        planned_bytes: Reservations of all shards that some plan names.
        kept_bytes: Of them, those that are to stay.
        missing_bytes: Of them, what the cache cannot hold.
    """

    def __init__(self, horizon: Horizon) -> None:
        self.planned_bytes = 0
        self.kept_bytes = 0
        self.missing_bytes = 0
        self._horizon = horizon
        self._chosen_for: object = None

    def next_to_fill(self, free_bytes: int, now_s: float) -> Missing | None:
        """A shard that is to stay and is missing, if it fits into free space and enough has been read."""
        for catalog in self._horizon.catalogs:
            if not catalog.readers or catalog.num_filled >= FILL_FACTOR * catalog.num_passed:
                continue
            while catalog.to_fill:
                place = catalog.to_fill[0]
                if not catalog.present[place]:
                    reserve_bytes = int(catalog.reserve_bytes[place])
                    if reserve_bytes > free_bytes:
                        break
                    catalog.to_fill.popleft()
                    catalog.num_filled += 1
                    use = self._horizon.next_use(catalog.keys[place], now_s)
                    reader = use.reader or next(chain.from_iterable(catalog.readers.values()))
                    return Missing(catalog.keys[place], reserve_bytes, use.seconds, reader.session.owner)
                catalog.to_fill.popleft()
        return None

    def adopt(self, key: bytes, now_s: float) -> None:
        """While the cache is being filled, a shard that has come anyway stays instead of one that is needed later."""
        reader = self._horizon.next_use(key, now_s).reader
        if reader is None:
            return
        catalog = reader.session.catalog
        into = catalog.index[key]
        while catalog.to_fill and not catalog.kept[into]:
            out = catalog.to_fill.pop()
            if (
                not catalog.present[out]
                and catalog.kept[out]
                and catalog.reserve_bytes[out] >= catalog.reserve_bytes[into]
            ):
                catalog.kept[[out, into]] = False, True

    def choose(self, capacity_bytes: int) -> list[bytes]:
        """Decide anew which shards stay; to be called when plans have changed.

        Args:
            capacity_bytes: Reservations that the cache can hold.

        Returns:
            The shards for which the answer changed.
        """
        plans = tuple(
            digest for catalog in self._horizon.catalogs for digest in (id(catalog), *sorted(catalog.readers))
        )
        if (capacity_bytes, plans) == self._chosen_for:
            return []
        self._chosen_for = capacity_bytes, plans
        wanted = [(catalog, *self._union(catalog)) for catalog in self._horizon.catalogs]
        bytes_of = [int(catalog.reserve_bytes[used].sum()) for catalog, used, _ in wanted]
        self.planned_bytes = sum(bytes_of)
        self.missing_bytes = max(0, self.planned_bytes - capacity_bytes)
        budget_bytes = float(capacity_bytes)
        if self.planned_bytes > capacity_bytes:
            # Of the shards in use some do not stay; those ahead get the places of what was read in this epoch.
            missing = 1 - capacity_bytes / self.planned_bytes
            budget_bytes = max(0.0, capacity_bytes - self._horizon.working_set_bytes * missing)
        changed: list[bytes] = []
        self.kept_bytes = 0
        for (catalog, used, is_shared), size_bytes in zip(wanted, bytes_of, strict=True):
            kept = np.zeros(len(catalog.keys), dtype=bool)
            if size_bytes and not (is_shared and self.planned_bytes > capacity_bytes):
                kept = retention.chosen(
                    used,
                    rank=_steady(catalog),
                    reserve_bytes=catalog.reserve_bytes,
                    budget_bytes=int(min(1.0, budget_bytes / self.planned_bytes) * size_bytes),
                )
            changed += [catalog.keys[place] for place in np.flatnonzero(kept != catalog.kept).tolist()]
            catalog.kept = kept
            catalog.to_fill = self._fillable(catalog)
            catalog.spent = deque(place for place in dict.fromkeys(catalog.spent) if kept[place])
            self.kept_bytes += int(catalog.reserve_bytes[kept].sum())
        return changed

    def _union(self, catalog: Catalog) -> tuple[NDArray[np.bool_], bool]:
        if not catalog.readers:
            return np.zeros(len(catalog.keys), dtype=bool), False
        used = retention.scans([readers[0].table for readers in catalog.readers.values()])
        return retention.union(used, catalog.reserve_bytes)

    def _fillable(self, catalog: Catalog) -> deque[int]:
        places = np.flatnonzero(catalog.kept & (catalog.present == 0))
        soonest = np.full(len(places), NEVER, dtype=np.int64)
        for readers in catalog.readers.values():
            clock = max(reader.session.clock for reader in readers)
            firsts = readers[0].table.next_firsts(places, clock)
            soonest = np.minimum(soonest, np.where(firsts == NEVER, NEVER, firsts - clock))
        order = np.argsort(soonest, kind="stable")
        return deque(places[order[soonest[order] != NEVER]].tolist())


def _steady(catalog: Catalog) -> NDArray[np.int64]:
    """Places in the order in which they are chosen: those that stay already, what is there, then by hash."""
    rank = catalog.rank
    standing = np.where(catalog.kept, 0, np.where(catalog.present != 0, 1, 2))
    return rank[np.argsort(standing[rank], kind="stable")]
