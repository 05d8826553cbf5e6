"""A node without network and disk: it carries out effects in memory and counts what a disk would hold."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from cacheloader_daemon.plan.effects import Effect, Evict, Fetch, Grant, Promote, Refuse, ServeFromMemory
from cacheloader_daemon.plan.events import (
    Advanced,
    Demanded,
    Dropped,
    Event,
    FetchFailed,
    FetchFinished,
    PlanFollowed,
    Released,
    SessionClosed,
    SessionOpened,
    ShardRef,
)
from cacheloader_daemon.plan.machine import Planner
from cacheloader_daemon.plan.options import PlannerOptions
from cacheloader_daemon.plan.shares import ShareOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def number(shard_key: bytes) -> int:
    return int.from_bytes(shard_key, "big")


def shards(*reserve_bytes: int) -> list[ShardRef]:
    return [ShardRef(key=key(place), reserve_bytes=size) for place, size in enumerate(reserve_bytes)]


def plan_of(session: int, accesses: Iterable[tuple[int, int, int]], *, clock: int = 0) -> PlanFollowed:
    """A plan from (first clock, stop clock, shard)."""
    rows = list(accesses)
    return PlanFollowed(
        session=session,
        first_clock=np.array([row[0] for row in rows], dtype=np.int64),
        stop_clock=np.array([row[1] for row in rows], dtype=np.int64),
        shard=np.array([row[2] for row in rows], dtype=np.int32),
        clock=clock,
    )


class Node:
    """One planner and what it has ordered.

    Effects are noted; a test finishes fetches and evictions when it likes. The node checks by itself that the disk
    never holds more than the quota, that leased blobs are not evicted, that every request is answered once, and the
    planner's own invariants after every event.
    """

    def __init__(
        self,
        quota_bytes: int,
        *,
        resident: Sequence[tuple[int, int]] = (),
        overhead_bytes: int = 0,
        max_fetches: int = 8,
        lookahead_bytes: int | None = None,
        patience_s: float = 5.0,
        eviction: str = "plan",
        checks: bool = True,
        shares: ShareOptions | None = None,
    ) -> None:
        options = PlannerOptions(
            quota_bytes=quota_bytes,
            max_fetches=max_fetches,
            lookahead_bytes=lookahead_bytes,
            patience_s=patience_s,
            eviction=eviction,
            shares=shares or ShareOptions(),
        )
        self.quota_bytes = quota_bytes
        self.overhead_bytes = overhead_bytes
        self.allowed_bytes = max(quota_bytes, overhead_bytes + sum(size for _, size in resident))
        self.planner = Planner(
            options, resident=[(key(place), size) for place, size in resident], overhead_bytes=overhead_bytes
        )
        self.checks = checks
        self.now_s = 0.0
        self.refs: dict[int, Sequence[ShardRef]] = {}
        self.fetching: dict[int, bool] = {}
        """Shard to whether somebody waits for it."""
        self.evicting: set[int] = set()
        self.blobs: dict[int, int] = dict(resident)
        self.lost: list[tuple[int, int]] = []
        """Blobs without a file that leases keep on disk."""
        self.leases: Counter[tuple[int, int]] = Counter()
        self.waiting: dict[tuple[int, int], int] = {}
        self.from_memory: list[tuple[int, int]] = []
        self.refused: list[tuple[int, int]] = []
        self.granted: list[tuple[int, int, bool]] = []
        self.fetches: list[int] = []
        self.evictions: list[int] = []
        self._requests = 0
        self._reservations: dict[int, int] = {}

    def tell(self, event: Event) -> list[Effect]:
        return self.carry_out(self.planner.handle(event, self.now_s))

    def wake(self) -> list[Effect]:
        return self.carry_out(self.planner.wake(self.now_s))

    def open(self, session: int, refs: Sequence[ShardRef], *, owner: str = "") -> None:
        self.refs[session] = refs
        self.tell(SessionOpened(session=session, shards=refs, owner=owner))

    def close(self, session: int) -> None:
        del self.refs[session]
        for held in [held for held in self.leases if held[0] == session]:
            del self.leases[held]
        for wait in [wait for wait in self.waiting if wait[0] == session]:
            del self.waiting[wait]
        self._reap()
        self.tell(SessionClosed(session=session))

    def follow(self, session: int, accesses: Iterable[tuple[int, int, int]], *, clock: int = 0) -> None:
        self.tell(plan_of(session, accesses, clock=clock))

    def advance(self, session: int, clock: int) -> None:
        self.tell(Advanced(session=session, clock=clock))

    def demand(self, session: int, shard: int) -> int:
        self._requests += 1
        self.waiting[session, self._requests] = number(self.refs[session][shard].key)
        self.tell(Demanded(session=session, request=self._requests, shard=shard))
        return self._requests

    def release(self, session: int, shard: int) -> None:
        """Give back a lease by the shard's place in the session's data set."""
        held = (session, number(self.refs[session][shard].key))
        self.leases[held] -= 1
        assert self.leases[held] >= 0
        self._reap()
        self.tell(Released(session=session, shard=shard))

    def release_number(self, session: int, shard: int) -> None:
        """Give back a lease by the shard's number in the node."""
        self.release(session, [number(ref.key) for ref in self.refs[session]].index(shard))

    def set_overhead(self, overhead_bytes: int) -> None:
        self.overhead_bytes = overhead_bytes
        self.allowed_bytes = max(self.allowed_bytes, self.disk_bytes)
        self.planner.set_overhead(overhead_bytes)

    def finish(self, shard: int, used_bytes: int | None = None) -> None:
        del self.fetching[shard]
        used_bytes = self.reserve_bytes(shard) if used_bytes is None else used_bytes
        self.blobs[shard] = used_bytes
        self.tell(FetchFinished(key=key(shard), used_bytes=used_bytes))

    def fail(self, shard: int, *, disk: bool) -> None:
        del self.fetching[shard]
        self.tell(FetchFailed(key=key(shard), disk=disk))

    def drop(self, shard: int) -> None:
        self.evicting.remove(shard)
        del self.blobs[shard]
        self.tell(Dropped(key=key(shard)))

    def lose(self, shard: int) -> None:
        size_bytes = self.blobs.pop(shard)
        if any(count for (_, leased), count in self.leases.items() if leased == shard):
            self.lost.append((shard, size_bytes))
        self.tell(Dropped(key=key(shard)))

    def settle(self) -> None:
        """Finish everything that is ordered, and what follows from it."""
        while self.fetching or self.evicting:
            for shard in sorted(self.evicting):
                self.drop(shard)
            for shard in list(self.fetching):
                if shard in self.fetching:
                    self.finish(shard)

    def reserve_bytes(self, shard: int) -> int:
        if shard in self._reservations:
            return self._reservations[shard]
        return next(ref.reserve_bytes for refs in self.refs.values() for ref in refs if ref.key == key(shard))

    @property
    def disk_bytes(self) -> int:
        """What the disk holds, or may hold before the planner hears of it."""
        reserved_bytes = sum(self._reservations[shard] for shard in self.fetching)
        return self.overhead_bytes + reserved_bytes + sum(self.blobs.values()) + sum(size for _, size in self.lost)

    def carry_out(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            shard = number(effect.key)
            match effect:
                case Fetch():
                    assert shard not in self.fetching, f"shard {shard} is fetched twice"
                    assert shard not in self.blobs, f"shard {shard} is there and fetched again"
                    self.fetching[shard] = effect.demand
                    self._reservations[shard] = self.reserve_bytes(shard)
                    self.fetches.append(shard)
                case Promote():
                    assert self.fetching[shard] is False, f"shard {shard} was promoted for nothing"
                    self.fetching[shard] = True
                case Evict():
                    assert shard in self.blobs
                    assert not any(count for (_, leased), count in self.leases.items() if leased == shard)
                    self.evicting.add(shard)
                    self.evictions.append(shard)
                case Grant():
                    assert self.waiting.pop((effect.session, effect.request)) == shard
                    assert shard in self.blobs
                    assert shard not in self.evicting
                    self.leases[effect.session, shard] += 1
                    self.granted.append((effect.session, shard, effect.hit))
                case ServeFromMemory():
                    assert self.waiting.pop((effect.session, effect.request)) == shard
                    self.from_memory.append((effect.session, shard))
                case Refuse():
                    assert self.waiting.pop((effect.session, effect.request)) == shard
                    self.refused.append((effect.session, shard))
        if self.checks:
            self.planner.check_invariants()
            self.allowed_bytes = max(self.quota_bytes, min(self.allowed_bytes, self.disk_bytes))
            assert self.disk_bytes <= self.allowed_bytes, f"{self.disk_bytes} bytes under {self.quota_bytes}"
        return effects

    def _reap(self) -> None:
        """The kernel frees a blob without a file when its last descriptor is closed."""
        leased = {shard for (_, shard), count in self.leases.items() if count}
        self.lost = [(shard, size_bytes) for shard, size_bytes in self.lost if shard in leased]
