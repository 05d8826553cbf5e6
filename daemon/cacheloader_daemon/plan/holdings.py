"""Every shard that is not absent, its bytes and its moves: one place, so that they cannot disagree."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from cacheloader_daemon.plan.eviction import VictimOrder
from cacheloader_daemon.plan.shares import NOBODY, ShareOptions, Shares
from cacheloader_daemon.plan.states import MOVES, Cause, IllegalEvent, ShardState

if TYPE_CHECKING:
    from cacheloader_daemon.plan.horizon import Horizon
    from cacheloader_daemon.plan.ledger import Ledger
    from cacheloader_daemon.plan.readers import Session
    from cacheloader_daemon.plan.rests import Rests

STORY_MOVES = 4096
"""Moves of all shards kept for the story of an illegal event: enough for minutes, half a megabyte at most."""


class Wait(msgspec.Struct, frozen=True):
    """A request without an answer.

    Attributes:
        session: Who waits.
        request: The session's name for the wait.
    """

    session: Session
    request: int


@dataclass(slots=True, eq=False)
class Shard:
    """The record of a shard that is not absent.

    Attributes:
        key: Its key.
        reserve_bytes: Upper bound of its size on disk.
        state: Where it stands.
        used_bytes: Its size on disk once it is a blob.
        leases: Leases of all sessions together.
        waits: Requests for it, oldest first.
        demand: Whether its fetch was begun for somebody who waits, or somebody has come to wait since.
        used: When it was used last, as a number that grows.
        blocked_since_s: Since when its requests wait for space, ``None`` while they do not.
        began_s: When its last fetch began.
        owner: For whom it was fetched.
    """

    key: bytes
    reserve_bytes: int
    state: ShardState = ShardState.ABSENT
    used_bytes: int = 0
    leases: int = 0
    waits: list[Wait] = field(default_factory=list)
    demand: bool = False
    used: int = 0
    blocked_since_s: float | None = None
    began_s: float = 0.0
    owner: str = NOBODY


class Holdings:
    """The shards, their bytes and the order in which they are given up.

    Args:
        ledger: The bytes.
        horizon: The plans.
        rests: Shards that are not to be fetched ahead for a while.
        shares: What counts for whom.
    """

    def __init__(self, ledger: Ledger, horizon: Horizon, rests: Rests, shares: Shares | None = None) -> None:
        self.ledger = ledger
        self.shares = shares or Shares(ShareOptions())
        self.shards: dict[bytes, Shard] = {}
        self.victims = VictimOrder(horizon, lambda key: self.shards[key].used)
        self.queue: dict[bytes, Shard] = {}
        """Shards with requests that no fetch answers: wanted, or demanded while being evicted. Oldest first."""
        self.num_fetching = 0
        self.num_demand_fetching = 0
        self.ahead: dict[bytes, int] = {}
        """Shards fetched ahead and not used yet, with the bytes that they count."""
        self.ahead_bytes = 0
        self.traded: dict[bytes, int] = {}
        """Shards that have got the place of another and are not used yet, with their reservations."""
        self.traded_bytes = 0
        self._horizon = horizon
        self._rests = rests
        self._uses = 0
        self._story: deque[tuple[float, bytes, str]] = deque(maxlen=STORY_MOVES)

    def state(self, key: bytes) -> ShardState:
        """Where a shard stands."""
        shard = self.shards.get(key)
        return ShardState.ABSENT if shard is None else shard.state

    def size_bytes(self, key: bytes) -> int:
        """Size of a resident on disk."""
        return self.shards[key].used_bytes

    def owner_and_size(self, key: bytes) -> tuple[str, int]:
        """For whom a resident counts, and how much."""
        shard = self.shards[key]
        return shard.owner, shard.used_bytes

    def illegal(self, what: str, key: bytes | None = None) -> IllegalEvent:
        """The error for an event that cannot have happened."""
        if key is None:
            return IllegalEvent(what)
        story = [f"{now_s:.3f} s: {move}" for now_s, of, move in self._story if of == key][-12:]
        return IllegalEvent(
            f"{what}; shard {key.hex()} is {self.state(key).value}; its story: {'; '.join(story) or 'none'}"
        )

    def found(self, key: bytes, used_bytes: int) -> None:
        """A blob of an earlier start, used after those that were found before it."""
        assert key not in self.shards, f"shard {key.hex()} was found twice"
        shard = self.shards[key] = Shard(key, used_bytes, state=ShardState.RESIDENT, used_bytes=used_bytes)
        self._horizon.track(key)
        self.ledger.found(used_bytes)
        self.shares.take(shard.owner, used_bytes)
        self._use(shard)
        self.victims.add(key, 0.0)

    def want(self, key: bytes, reserve_bytes: int, wait: Wait, now_s: float) -> None:
        """Somebody waits for an absent shard."""
        shard = self.shards[key] = Shard(key, reserve_bytes)
        self._horizon.track(key)
        self._move(shard, Cause.DEMANDED, now_s)
        shard.waits.append(wait)
        self.queue[key] = shard

    def join(self, shard: Shard, reserve_bytes: int, wait: Wait, now_s: float) -> None:
        """One more waits for a shard that is wanted, fetched or evicted."""
        shard.waits.append(wait)
        self._note(shard, f"request {wait.request} of session {wait.session.number} joined", now_s)
        if shard.state is ShardState.EVICTING and shard.key not in self.queue:
            shard.reserve_bytes = reserve_bytes
            self.queue[shard.key] = shard
            shard.blocked_since_s = now_s
        if shard.state is ShardState.FETCHING and not shard.demand:
            shard.demand = True
            self.num_demand_fetching += 1
            self.not_ahead(shard.key)

    def unwait(self, shard: Shard, wait: Wait, now_s: float) -> None:
        """A request was answered from memory, or its session is gone."""
        shard.waits.remove(wait)
        if shard.waits or shard.key not in self.queue:
            return
        del self.queue[shard.key]
        shard.blocked_since_s = None
        if shard.state is ShardState.WANTED:
            self._move(shard, Cause.WANTED_NO_MORE, now_s)
            self._forget(shard)

    def start_demand(self, shard: Shard, now_s: float) -> None:
        """Reserve space for a wanted shard whose fetch begins."""
        self.ledger.reserve(shard.reserve_bytes)
        shard.owner = shard.waits[0].session.owner
        self.shares.take(shard.owner, shard.reserve_bytes)
        self._move(shard, Cause.DEMAND_FETCH_STARTED, now_s)
        del self.queue[shard.key]
        shard.blocked_since_s = None
        shard.demand = True
        shard.began_s = now_s
        self.num_fetching += 1
        self.num_demand_fetching += 1

    def start_prefetch(
        self, key: bytes, reserve_bytes: int, now_s: float, *, ahead_bytes: int, owner: str = NOBODY
    ) -> None:
        """Reserve space for an absent shard that is fetched ahead.

        ``ahead_bytes`` is what it counts in the window, 0 if it is only to fill the cache.
        """
        self.ledger.reserve(reserve_bytes)
        self.shares.take(owner, reserve_bytes)
        shard = self.shards[key] = Shard(key, reserve_bytes, began_s=now_s, owner=owner)
        self._horizon.track(key)
        self._move(shard, Cause.PREFETCH_STARTED, now_s)
        self.num_fetching += 1
        if ahead_bytes:
            self.ahead[key] = ahead_bytes
            self.ahead_bytes += ahead_bytes

    def commit(self, shard: Shard, used_bytes: int, now_s: float) -> list[Wait]:
        """The fetch has a blob; returns who waits for it, to be leased next."""
        self.ledger.commit(shard.reserve_bytes, used_bytes)
        self.shares.take(shard.owner, used_bytes - shard.reserve_bytes)
        self._move(shard, Cause.FETCH_FINISHED, now_s)
        self._landed(shard)
        shard.used_bytes = used_bytes
        if shard.key in self.ahead:
            self.ahead_bytes += used_bytes - self.ahead[shard.key]
            self.ahead[shard.key] = used_bytes
        waits, shard.waits = shard.waits, []
        self._use(shard)
        self.victims.add(shard.key, now_s)
        return waits

    def fail(self, shard: Shard, now_s: float) -> list[Wait]:
        """The fetch has no blob; returns who waits for it."""
        self.ledger.cancel(shard.reserve_bytes)
        self.shares.take(shard.owner, -shard.reserve_bytes)
        self._move(shard, Cause.FETCH_FAILED, now_s)
        self._landed(shard)
        waits, shard.waits = shard.waits, []
        self._rests.failed(shard.key, now_s)
        self._forget(shard)
        return waits

    def end_rests(self, now_s: float) -> None:
        """Shards whose rest is over may be fetched ahead again."""
        for key in self._rests.rested(now_s):
            if key not in self.shards:
                self._horizon.untrack(key)

    def evict(self, key: bytes, now_s: float) -> int:
        """A resident without leases is to be unlinked; returns its size if it was fetched ahead for nothing, else 0."""
        shard = self.shards[key]
        assert not shard.leases, f"shard {key.hex()} is leased and cannot be evicted"
        self.victims.discard(key)
        unused_bytes = self.ahead.get(key, 0)
        self.not_ahead(key)
        self.ledger.evict(shard.used_bytes)
        self.shares.take(shard.owner, -shard.used_bytes)
        self._move(shard, Cause.CHOSEN_AS_VICTIM, now_s)
        return unused_bytes

    def drop(self, shard: Shard, now_s: float) -> None:
        """The file is gone, of a shard that is evicting or resident."""
        if shard.state is ShardState.EVICTING:
            self.ledger.evicted(shard.used_bytes)
            if shard.waits:
                self._move(shard, Cause.DROPPED_WHILE_DEMANDED, now_s)
                return
            self._move(shard, Cause.DROPPED, now_s)
            self._forget(shard)
            return
        self.victims.discard(shard.key)
        self.not_ahead(shard.key)
        self.shares.take(shard.owner, -shard.used_bytes)
        if shard.leases:
            self.ledger.lost_while_leased(shard.used_bytes)
            self._move(shard, Cause.LOST_WHILE_LEASED, now_s)
            return
        self.ledger.lost(shard.used_bytes)
        self._move(shard, Cause.LOST, now_s)
        self._forget(shard)

    def lease(self, shard: Shard, session: Session, now_s: float) -> None:
        """A resident is leased to ``session``."""
        shard.leases += 1
        session.leases[shard.key] = session.leases.get(shard.key, 0) + 1
        self.victims.discard(shard.key)
        self.not_ahead(shard.key)
        self._use(shard)
        self._note(shard, f"leased to session {session.number}", now_s)

    def release(self, shard: Shard, session: Session, now_s: float) -> None:
        """One lease of ``session`` ends."""
        self._note(shard, f"released by session {session.number}", now_s)
        session.leases[shard.key] -= 1
        if not session.leases[shard.key]:
            del session.leases[shard.key]
        shard.leases -= 1
        if shard.leases:
            return
        if shard.state is ShardState.UNLINKED:
            self.ledger.closed(shard.used_bytes)
            self._move(shard, Cause.LAST_LEASE_ENDED, now_s)
            self._forget(shard)
            return
        self._use(shard)
        self.victims.add(shard.key, now_s)

    def trade(self, key: bytes, reserve_bytes: int) -> None:
        """A shard that is to be fetched has got the place of another."""
        self.traded[key] = reserve_bytes
        self.traded_bytes += reserve_bytes

    def not_ahead(self, key: bytes) -> None:
        """The shard is used, or nobody will use it: it no longer counts as fetched ahead."""
        self.ahead_bytes -= self.ahead.pop(key, 0)
        self.traded_bytes -= self.traded.pop(key, 0)

    def _landed(self, shard: Shard) -> None:
        self.num_fetching -= 1
        if shard.demand:
            self.num_demand_fetching -= 1
            shard.demand = False

    def _use(self, shard: Shard) -> None:
        self._uses += 1
        shard.used = self._uses

    def _move(self, shard: Shard, cause: Cause, now_s: float) -> None:
        state = MOVES.get((shard.state, cause))
        if state is None:
            raise self.illegal(f"no move {cause.value!r} leads out of the state {shard.state.value!r}", shard.key)
        self._note(shard, f"{shard.state.value} -> {state.value} ({cause.value})", now_s)
        shard.state = state

    def _forget(self, shard: Shard) -> None:
        self.not_ahead(shard.key)
        del self.shards[shard.key]
        if shard.key not in self._rests:
            self._horizon.untrack(shard.key)

    def _note(self, shard: Shard, what: str, now_s: float) -> None:
        self._story.append((now_s, shard.key, what))
