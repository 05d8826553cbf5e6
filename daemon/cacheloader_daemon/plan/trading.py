"""Places taken from shards that were read in this epoch, for shards that it still has to fetch: it costs no byte.

A shard that stays and was read in this epoch is not needed before the next one. Its place can go to a shard that this
epoch still has to fetch and that then stays instead: the one is missing in the next epoch and the other is not. So
nothing has to be set apart for what is fetched ahead, and while a bunch of hits leaves the link idle the lead grows.

Of some shards that were read the one goes that is needed last. So more of the next epoch's hits come early and more of
its misses late: while the hits are read the link works ahead, and it has something to do until the epoch ends. Were
misses spread by chance alone, an epoch of *n* of them over a link that just suffices would wait for about 0.6 / sqrt(n)
of its time. If always the one went that is needed last of all, the lead would have to be most of an epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cacheloader_daemon.plan.eviction import may_replace
from cacheloader_daemon.plan.shares import NOBODY

if TYPE_CHECKING:
    from cacheloader_daemon.plan.catalog import Catalog
    from cacheloader_daemon.plan.holdings import Holdings
    from cacheloader_daemon.plan.horizon import Horizon

CHOICES = 4
"""Shards that were read, of which the one goes that is needed last. In simulations of narrow links 2 waited up to 4 %
longer than needed, 4 up to 3 % and 8 up to 3 %, with a longer lead."""

LEAD_PART = 4
"""Shards that have got a place while the link had nothing else to do, and are not used yet, take at most one part in so
many of the cache. A job that ends early has fetched no more for nothing; with an eighth the link stood still in the
first half of an epoch."""

MAX_SPARED = 32
"""Shards looked at in vain for one exchange: those needed too soon in the next epoch, or kept for another owner."""


class Trade(msgspec.Struct, frozen=True):
    """One exchange of places.

    Attributes:
        catalog: Of all.
        out: Places of the residents that go.
        into: Place of the shard that is to be fetched and to stay.
    """

    catalog: Catalog
    out: tuple[int, ...]
    into: int

    def settle(self) -> list[bytes]:
        """Write down who stays from now on; returns the residents that go."""
        self.catalog.kept[list(self.out)] = False
        self.catalog.kept[self.into] = True
        return [self.catalog.keys[place] for place in self.out]


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
        """Which exchange to make now that the link has nothing else to do, if any."""
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
            if use.reader.table.num_coming(into, use.reader.session.clock) < 2:
                return None  # needed once more only, in the next epoch, as those after it
            return self.place_for(missing.key, missing.reserve_bytes, missing.seconds, missing.owner, now_s)
        return None

    def place_for(self, key: bytes, size_bytes: int, incoming_s: float, owner: str, now_s: float) -> Trade | None:
        """The exchange that frees ``size_bytes`` for a shard that some plan names, if there is one.

        Args:
            key: The shard.
            size_bytes: What is missing for it.
            incoming_s: Time until it is needed.
            owner: For whom it is fetched.
            now_s: The present.
        """
        reader = self._horizon.next_use(key, now_s).reader
        if reader is None:
            return None
        catalog, out = reader.session.catalog, list[int]()
        while size_bytes > 0:
            place = self._farthest_of_some(catalog, incoming_s, owner, now_s)
            if place is None:
                catalog.spent.extendleft(reversed(out))
                return None
            out.append(place)
            size_bytes -= self._holdings.size_bytes(catalog.keys[place])
        return Trade(catalog, tuple(out), catalog.index[key])

    def _farthest_of_some(self, catalog: Catalog, incoming_s: float, owner: str, now_s: float) -> int | None:
        """Of the first on the list the one that is needed last, off the list; the others are its last ones now."""
        found: list[tuple[float, int]] = []
        num_spared = 0
        while len(found) < CHOICES and catalog.spent and num_spared < MAX_SPARED:
            place = catalog.spent.popleft()
            if not self._is_spent(catalog, place, now_s):
                continue
            key = catalog.keys[place]
            if self._may_go(key, incoming_s, owner, now_s):
                found.append((self._horizon.next_use(key, now_s).seconds, place))
            else:
                num_spared += 1
                catalog.spent.append(place)
        if not found:
            return None
        chosen = max(found)
        catalog.spent.extend(place for _, place in found if place != chosen[1])
        return chosen[1]

    def _is_spent(self, catalog: Catalog, place: int, now_s: float) -> bool:
        key = catalog.keys[place]
        if not catalog.kept[place] or key not in self._holdings.victims:
            return False
        use = self._horizon.next_use(key, now_s)
        return (
            use.reader is not None
            and use.reader.session.catalog is catalog
            and use.reader.table.num_coming(place, use.reader.session.clock) == 1
            and not self._is_kept_elsewhere(catalog, key)
        )

    def _may_go(self, key: bytes, incoming_s: float, owner: str, now_s: float) -> bool:
        shares = self._holdings.shares
        if shares.is_shared and self._holdings.shards[key].owner not in {owner, NOBODY}:
            return False
        return may_replace(victim_s=self._horizon.next_use(key, now_s).seconds, incoming_s=incoming_s)

    def _is_kept_elsewhere(self, catalog: Catalog, key: bytes) -> bool:
        return any(
            other is not catalog and (place := other.index.get(key)) is not None and other.kept[place]
            for other in self._horizon.catalogs
        )
