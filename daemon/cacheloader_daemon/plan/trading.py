"""A longer lead where hits come in a bunch: a shard that stays gives its place to one that was to pass.

The window is short, since what it takes cannot stay. While a bunch of hits is read it is full, and the link would have
nothing to do, although it will have too much to do afterwards. But a shard that stays and was read in this epoch is not
needed before the next one. Its place can go to a shard that this epoch still has to fetch and that then stays instead:
no byte more is read, since the one is missing in the next epoch and the other is not. Who has been read longest is
traded first, which says nothing about where the next epoch, in an order of its own, needs it: what stays remains
spread evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheloader_daemon.plan.eviction import may_replace

if TYPE_CHECKING:
    from cacheloader_daemon.plan.catalog import Catalog
    from cacheloader_daemon.plan.holdings import Holdings
    from cacheloader_daemon.plan.horizon import Horizon

LEAD_PART = 8
"""Shards that have got a place by trade and are not used yet take at most one part in so many of the cache: what chance
brings in a bunch is of the order of the root of the number of shards, and a job that ends early has fetched no more for
nothing."""


@dataclass(frozen=True, slots=True)
class Trade:
    """One exchange of places.

    Attributes:
        catalog: Of both.
        out: Place of the resident that goes.
        into: Place of the shard that is to be fetched and to stay.
    """

    catalog: Catalog
    out: int
    into: int


class Trading:
    """Finds exchanges that cost no bytes.

    Args:
        holdings: The shards.
        horizon: The plans.
    """

    def __init__(self, holdings: Holdings, horizon: Horizon) -> None:
        self._holdings = holdings
        self._horizon = horizon

    def next_trade(self, quota_bytes: int, now_s: float) -> Trade | None:
        """Which exchange to make now, if any."""
        if self._holdings.traded_bytes >= quota_bytes // LEAD_PART:
            return None
        if not any(catalog.spent for catalog in self._horizon.catalogs):
            return None
        for missing in self._horizon.missing(now_s):
            use = self._horizon.next_use(missing.key, now_s)
            if use.reader is None:
                return None
            catalog = use.reader.session.catalog
            into = catalog.index[missing.key]
            if catalog.kept[into]:
                continue  # it has a place already
            table, clock = use.reader.table, use.reader.session.clock
            if table.num_coming(into, clock) < 2:
                return None  # needed once more only, in the next epoch, as those after it
            out = self._oldest_spent(catalog, missing.seconds, missing.reserve_bytes, missing.owner, now_s)
            return None if out is None else Trade(catalog, out, into)
        return None

    def _oldest_spent(
        self, catalog: Catalog, incoming_s: float, reserve_bytes: int, owner: str, now_s: float
    ) -> int | None:
        while catalog.spent:
            place = catalog.spent[0]
            key = catalog.keys[place]
            if not catalog.kept[place] or key not in self._holdings.victims:
                catalog.spent.popleft()
                continue
            use = self._horizon.next_use(key, now_s)
            is_spent = (
                use.reader is not None
                and use.reader.session.catalog is catalog
                and use.reader.table.num_coming(place, use.reader.session.clock) == 1
            )
            is_like = self._holdings.shards[key].owner == owner and reserve_bytes <= catalog.reserve_bytes[place]
            if is_spent and is_like and not self._is_kept_elsewhere(catalog, key):
                return place if may_replace(victim_s=use.seconds, incoming_s=incoming_s) else None
            catalog.spent.popleft()
        return None

    def _is_kept_elsewhere(self, catalog: Catalog, key: bytes) -> bool:
        return any(
            other is not catalog and (place := other.index.get(key)) is not None and other.kept[place]
            for other in self._horizon.catalogs
        )
