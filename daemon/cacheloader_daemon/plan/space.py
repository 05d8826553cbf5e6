"""Space for one more shard: what is free, what comes free, and whose place may be taken."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from cacheloader_daemon.plan.effects import Effect, Evict
from cacheloader_daemon.plan.shares import NOBODY, Claim

if TYPE_CHECKING:
    from cacheloader_daemon.plan.holdings import Holdings
    from cacheloader_daemon.plan.trading import Trade, Trading


class Room(Enum):
    """Whether there is space for one more shard."""

    READY = "free now"
    COMING = "free once evictions under way are done"
    NONE = "everything is leased or needed sooner"


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that needs space.

    Attributes:
        key: The shard.
        reserve_bytes: Its reservation.
        seconds: Time until it is needed, ``None`` if somebody waits for it.
        owner: For whom it is fetched.
    """

    key: bytes
    reserve_bytes: int
    seconds: float | None
    owner: str


class Space:
    """Evicts where that does no harm.

    Args:
        holdings: The shards and their bytes.
        trading: Exchanges of places.

    Attributes:
        claimed_bytes: Needs of shards that this round found to be waiting for evictions.
        num_evictions: Blobs chosen as victims.
        unused_prefetch_bytes: Blobs fetched ahead that were evicted unused.
    """

    def __init__(self, holdings: Holdings, trading: Trading) -> None:
        self.claimed_bytes = 0
        self.num_evictions = 0
        self.unused_prefetch_bytes = 0
        self._holdings = holdings
        self._trading = trading

    def shed(self, now_s: float, effects: list[Effect]) -> None:
        """Give up blobs while more was found on disk than the quota allows."""
        ledger = self._holdings.ledger
        while ledger.free_bytes + ledger.evicting_bytes < 0:
            borrowed = self._claim(NOBODY, own=True, others=True, by_right=True)
            if self._holdings.shares.is_shared and self._take(1, None, now_s, effects, borrowed):
                continue
            victim = self._holdings.victims.farthest(now_s)
            if victim is None:
                return
            self._evict(victim.key, now_s, effects)

    def make(self, incoming: Incoming, now_s: float, effects: list[Effect]) -> Room:
        """Find space behind all shards that this round has found to be waiting."""
        ledger, shares = self._holdings.ledger, self._holdings.shares
        excess_bytes = shares.excess_bytes(incoming.owner, incoming.reserve_bytes)
        if excess_bytes > 0 and not self._free(incoming, excess_bytes, now_s, effects, is_excess=True):
            return Room.NONE
        if not self.claimed_bytes and incoming.reserve_bytes <= ledger.free_bytes:
            return Room.READY
        short_bytes = self.claimed_bytes + incoming.reserve_bytes - ledger.free_bytes - ledger.evicting_bytes
        if short_bytes > 0 and not self._free(incoming, short_bytes, now_s, effects):
            return Room.NONE
        self.claimed_bytes += incoming.reserve_bytes
        return Room.COMING

    def settle(self, trade: Trade, now_s: float, effects: list[Effect]) -> None:
        """Carry an exchange out: those who go, go."""
        for key in trade.settle():
            self._evict(key, now_s, effects)

    def _free(
        self, incoming: Incoming, size_bytes: int, now_s: float, effects: list[Effect], *, is_excess: bool = False
    ) -> bool:
        """Evict so many bytes: what only passes, then what was read in this epoch, for who waits what stays as well."""
        passing = self._holdings.victims.farthest_free(now_s) if incoming.seconds is None else None
        # To take the next shards of all from the window would only move the wait.
        is_last_resort = incoming.seconds is None and (passing is None or passing.key in self._holdings.ahead)
        if is_last_resort and self._exchange(incoming, size_bytes, now_s, effects):
            return True
        if is_excess:
            is_freed = self._take(size_bytes, incoming.seconds, now_s, effects, self._claim(incoming.owner, own=True))
        else:
            is_freed = self._take_for(incoming, size_bytes, now_s, effects)
        return is_freed or (not is_last_resort and self._exchange(incoming, size_bytes, now_s, effects))

    def _exchange(self, incoming: Incoming, size_bytes: int, now_s: float, effects: list[Effect]) -> bool:
        trade = self._trading.place_for(incoming.key, size_bytes, incoming.seconds or 0.0, incoming.owner, now_s)
        if trade is None:
            return False
        self.settle(trade, now_s, effects)
        return True

    def _take_for(self, incoming: Incoming, short_bytes: int, now_s: float, effects: list[Effect]) -> bool:
        shares, owner = self._holdings.shares, incoming.owner
        if not shares.is_shared:
            return self._take(short_bytes, incoming.seconds, now_s, effects, None)
        # What others have borrowed is given back first, whenever they would need it.
        borrowed = self._claim(owner, others=True, by_right=True)
        if shares.is_entitled(owner, incoming.reserve_bytes) and self._take(
            short_bytes, incoming.seconds, now_s, effects, borrowed
        ):
            return True
        return self._take(short_bytes, incoming.seconds, now_s, effects, self._claim(owner, own=True, others=True))

    def _claim(self, owner: str, *, own: bool = False, others: bool = False, by_right: bool = False) -> Claim:
        holdings = self._holdings
        return Claim(holdings.shares, owner, holdings.owner_and_size, own=own, others=others, by_right=by_right)

    def _take(
        self, size_bytes: int, incoming_s: float | None, now_s: float, effects: list[Effect], claim: Claim | None
    ) -> bool:
        """Evict so many bytes, or nothing if that would do harm."""
        holdings = self._holdings
        victims = holdings.victims.choose(
            size_bytes,
            incoming_s=incoming_s,
            now_s=now_s,
            size_bytes=holdings.size_bytes,
            is_ahead=holdings.ahead.__contains__,
            claim=claim,
        )
        for victim in victims or ():
            self._evict(victim.key, now_s, effects)
        return victims is not None

    def _evict(self, key: bytes, now_s: float, effects: list[Effect]) -> None:
        self.unused_prefetch_bytes += self._holdings.evict(key, now_s)
        self.num_evictions += 1
        effects.append(Evict(key=key))
