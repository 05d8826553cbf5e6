"""What has to be true between any two events; tests ask after each of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cacheloader_daemon.plan.accesses import NEVER
from cacheloader_daemon.plan.states import ShardState

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from cacheloader_daemon.plan.holdings import Holdings
    from cacheloader_daemon.plan.horizon import Horizon
    from cacheloader_daemon.plan.readers import Session


def check(holdings: Holdings, horizon: Horizon, sessions: Mapping[int, Session], *, resting: Collection[bytes]) -> None:
    """Assert it.

    Args:
        holdings: The shards.
        horizon: The plans.
        sessions: Open sessions by number.
        resting: Shards that are not to be fetched ahead for a while.
    """
    holdings.ledger.check()
    _check_bytes(holdings)
    _check_requests(holdings, sessions)
    _check_victims(holdings, horizon)
    _check_horizon(holdings, horizon, resting)


def _check_bytes(holdings: Holdings) -> None:
    taken: Counter[ShardState] = Counter()
    for shard in holdings.shards.values():
        taken[shard.state] += shard.reserve_bytes if shard.state is ShardState.FETCHING else shard.used_bytes
    ledger = holdings.ledger
    assert taken[ShardState.RESIDENT] == ledger.resident_bytes, "resident bytes are not those of the residents"
    assert taken[ShardState.FETCHING] == ledger.reserved_bytes, "reserved bytes are not those of the fetches"
    assert taken[ShardState.EVICTING] == ledger.evicting_bytes, "evicting bytes are not those of the victims"
    assert taken[ShardState.UNLINKED] == ledger.unlinked_bytes, "unlinked bytes are not those of lost blobs"
    held: Counter[str] = Counter()
    for shard in holdings.shards.values():
        if shard.state in {ShardState.FETCHING, ShardState.RESIDENT}:
            held[shard.owner] += shard.reserve_bytes if shard.state is ShardState.FETCHING else shard.used_bytes
    for owner in {*held, *holdings.shares.by_owner()}:
        assert held[owner] == holdings.shares.held_bytes(owner), f"the bytes of owner {owner!r} do not add up"
    assert holdings.ahead_bytes == sum(holdings.ahead.values()), "the bytes fetched ahead do not add up"
    assert holdings.traded_bytes == sum(holdings.traded.values()), "the bytes of traded places do not add up"
    for key in holdings.ahead:
        assert holdings.state(key) in {ShardState.FETCHING, ShardState.RESIDENT}, "an absent shard is ahead"


def _check_requests(holdings: Holdings, sessions: Mapping[int, Session]) -> None:
    fetching = [shard for shard in holdings.shards.values() if shard.state is ShardState.FETCHING]
    assert len(fetching) == holdings.num_fetching, "the number of fetches is wrong"
    assert sum(shard.demand for shard in fetching) == holdings.num_demand_fetching, "that of demand fetches is wrong"
    for key, shard in holdings.shards.items():
        assert shard.state is not ShardState.ABSENT, f"absent shard {key.hex()} has a record"
        queued = shard.state is ShardState.WANTED or (shard.state is ShardState.EVICTING and bool(shard.waits))
        assert queued == (key in holdings.queue), f"shard {key.hex()} is queued without need, or not queued"
        assert shard.waits or shard.state is not ShardState.WANTED, f"nobody wants shard {key.hex()}"
        assert not shard.waits or shard.state in {ShardState.WANTED, ShardState.FETCHING, ShardState.EVICTING}
        assert not shard.leases or shard.state in {ShardState.RESIDENT, ShardState.UNLINKED}
        assert shard.leases or shard.state is not ShardState.UNLINKED, f"unlinked shard {key.hex()} has no lease"
    waits = {(wait.session.number, wait.request, key) for key, shard in holdings.shards.items() for wait in shard.waits}
    of_sessions = {
        (number, request, key) for number, session in sessions.items() for request, key in session.waits.items()
    }
    assert waits == of_sessions, "shards and sessions disagree on who waits"
    leases: Counter[bytes] = Counter()
    for session in sessions.values():
        leases.update(session.leases)
    assert leases == Counter({key: shard.leases for key, shard in holdings.shards.items() if shard.leases})


def _check_victims(holdings: Holdings, horizon: Horizon) -> None:
    victims = {key for key, shard in holdings.shards.items() if shard.state is ShardState.RESIDENT and not shard.leases}
    assert len(victims) == len(holdings.victims), "the victims are not the unleased residents"
    assert all(key in holdings.victims for key in victims), "the victims are not the unleased residents"
    for reader in horizon.readers:
        for key in (*reader.victims, *reader.kept):
            place = reader.session.catalog.index[key]
            first = reader.table.next_first(place, reader.session.clock)
            assert first != NEVER, "a reader lists a shard that it does not need again"
            heap = reader.kept if key in reader.kept else reader.victims
            assert heap.number(key) == -first, "a reader lists a shard with an outdated row"
            assert (heap is reader.kept) == horizon.is_kept(key), "a shard that is to stay is listed as one that is not"


def _check_horizon(holdings: Holdings, horizon: Horizon, resting: Collection[bytes]) -> None:
    for catalog in horizon.catalogs:
        for key, place in catalog.index.items():
            tracked = key in holdings.shards or key in resting
            assert horizon.is_tracked(key) == tracked, f"shard {key.hex()} could be fetched twice, or never"
            assert bool(catalog.present[place]) == horizon.is_tracked(key), "a catalog and the horizon disagree"
    for reader in horizon.readers:
        present = reader.session.catalog.present
        missing = reader.table.next_missing(present, 0, reader.session.clock)
        assert missing >= min(reader.frontier, reader.table.num_accesses), "a frontier has passed a missing shard"
        assert missing == reader.table.num_accesses or horizon.is_hungry(reader), "a hungry reader is forgotten"
