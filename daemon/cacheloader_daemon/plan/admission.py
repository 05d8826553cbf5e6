"""Which fetches to begin and which blobs to give up for them, after each event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheloader_daemon.plan.crowd import Crowd
from cacheloader_daemon.plan.effects import Effect, Fetch, ServeFromMemory
from cacheloader_daemon.plan.horizon import INFINITE
from cacheloader_daemon.plan.pace import FetchTimes
from cacheloader_daemon.plan.space import Incoming, Room, Space
from cacheloader_daemon.plan.states import ShardState
from cacheloader_daemon.plan.trading import Trading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cacheloader_daemon.plan.holdings import Holdings, Shard
    from cacheloader_daemon.plan.horizon import Horizon, Missing
    from cacheloader_daemon.plan.keeping import Keeping
    from cacheloader_daemon.plan.options import PlannerOptions
    from cacheloader_daemon.plan.readers import Session

SLOW_ANSWERS = 8
"""The window holds at most this many times the shards in flight: of fetch times spread as a lognormal with sigma 1, the
slowest of a thousand takes 13 times the mean, and half of what is in flight waits behind it at any moment."""

SMALL_PART = 64
"""The window takes at most one part in so many of the cache. It is short, since trading lengthens it where hits come in
a bunch."""

SHARED_PART = 32
"""Likewise where nothing stays, and so nothing can be traded and the window takes space from nobody."""

EDGE_PART = 32
"""Of what an epoch has to fetch at least, one part in so many may be fetched ahead of its beginning. Each byte of it is
fetched in addition, in every epoch: where the link is too narrow, it is waited for."""

EDGE_SHARDS = 2
"""Or so many shards, if that is more: the job shall not stop at the edge of an epoch."""

TAIL_FACTOR = 1.2
"""Fetched ahead is what is needed within so many times the slowest fetch of a thousand; a simulation of such fetches
waited 1 to 2 % of the time."""

LEAST_AHEAD_S = 1.0
"""And at least what is needed within this time: a blob has to be unlinked, the next one fetched, checked and indexed by
processes that give way to others."""

FILLING = 3 / 4
"""Part of the fetches that may be under way for shards that are only to fill the cache."""

FEW_PART = 4
"""Of the fetches one in so many may be under way for traded places where more of them bring no more: over a link that
is too narrow all come at the same time, and who waits for the first of them waits for the others."""


class Admission:
    """Decides under the quota; demands in the order they came, then prefetches in the order of their next use.

    Args:
        options: The bounds.
        holdings: The shards and their bytes.
        horizon: The plans.
        keeping: The shards that are to stay.
        sessions: Open sessions by number.
    """

    def __init__(
        self,
        options: PlannerOptions,
        holdings: Holdings,
        horizon: Horizon,
        keeping: Keeping,
        sessions: Mapping[int, Session],
    ) -> None:
        self.num_demand_fetches = 0
        self.num_prefetches = 0
        self.num_memory_serves = 0
        self.prefetch_rests_until_s = 0.0
        self.takes_shards = True
        """Whether the disk can take any; what it holds is kept while it cannot."""
        self._options = options
        self._holdings = holdings
        self._horizon = horizon
        self._keeping = keeping
        self._sessions = sessions
        self._trading = Trading(holdings, horizon)
        self.space = Space(holdings, self._trading)
        self.fetch_times = FetchTimes()
        self.crowd = Crowd(max(1, options.max_fetches // FEW_PART))
        self.used_part = 1.0
        """What shards really take of their reservations, on average."""

    @property
    def lookahead_bytes(self) -> int:
        """Bound of the bytes fetched ahead and not used yet."""
        if self._options.lookahead_bytes is not None:
            return self._options.lookahead_bytes
        quota_bytes, shard_bytes = self._options.quota_bytes, self._likely_bytes(self._horizon.largest_shard_bytes)
        busy_bytes = SLOW_ANSWERS * self._options.max_fetches * shard_bytes
        least_bytes = max(self._likely_bytes(self._horizon.working_set_bytes), min(quota_bytes // 4, 4 * shard_bytes))
        part_bytes = quota_bytes // (SMALL_PART if self._keeping.kept_bytes else SHARED_PART)
        return max(min(part_bytes, busy_bytes), least_bytes)

    @property
    def _edge_bytes(self) -> int:
        """Bound of what is fetched ahead for the next epoch, in places of shards that it needs as well."""
        if not self._keeping.kept_bytes or not self._keeping.missing_bytes:
            return self.lookahead_bytes
        least_bytes = EDGE_SHARDS * self._horizon.largest_shard_bytes
        return self._likely_bytes(max(least_bytes, self._keeping.missing_bytes // EDGE_PART))

    def _likely_bytes(self, reserve_bytes: int) -> int:
        return max(1, int(self.used_part * reserve_bytes)) if reserve_bytes else 0

    @property
    def ahead_s(self) -> float:
        """Shards needed within this time are fetched ahead; infinite until fetches have shown how long they take."""
        tail_s = self.fetch_times.tail_s
        return INFINITE if tail_s is None else max(LEAST_AHEAD_S, TAIL_FACTOR * tail_s)

    @property
    def wake_at_s(self) -> float | None:
        """When the longest blocked request runs out of patience, ``None`` if none is blocked."""
        since = [shard.blocked_since_s for shard in self._holdings.queue.values() if shard.blocked_since_s is not None]
        return min(since) + self._options.patience_s if since else None

    def run(self, now_s: float, effects: list[Effect]) -> None:
        """Begin what can begin; appends to ``effects``."""
        self.space.claimed_bytes = 0
        if not self.takes_shards:
            for shard in list(self._holdings.queue.values()):
                self.serve_from_memory(shard, len(shard.waits), now_s, effects)
            return
        self.space.shed(now_s, effects)
        if self._holdings.queue:
            self._start_demands(now_s, effects)
        if not self._holdings.queue and now_s >= self.prefetch_rests_until_s:
            self._start_prefetches(now_s, effects)
            self._fill(now_s, effects)
            self._trade(now_s, effects)

    def serve_from_memory(self, shard: Shard, num_waits: int, now_s: float, effects: list[Effect]) -> None:
        """Answer the oldest requests for ``shard`` without the disk."""
        for wait in shard.waits[:num_waits]:
            self._holdings.unwait(shard, wait, now_s)
            self.answer_from_memory(wait.session, wait.request, shard.key, now_s, effects)

    def answer_from_memory(
        self, session: Session, request: int, key: bytes, now_s: float, effects: list[Effect]
    ) -> None:
        """Answer one request, which no shard keeps any more, without the disk."""
        session.answered(request, now_s)
        effects.append(ServeFromMemory(session=session.number, request=request, key=key))
        self.num_memory_serves += 1

    def _start_demands(self, now_s: float, effects: list[Effect]) -> None:
        holdings = self._holdings
        for shard in list(holdings.queue.values()):
            since_s = shard.blocked_since_s
            # The very sum of ``wake_at_s``: the difference could round to just below the patience, for ever.
            out_of_patience = since_s is not None and now_s >= since_s + self._options.patience_s
            if out_of_patience or shard.reserve_bytes > holdings.ledger.capacity_bytes:
                self.serve_from_memory(shard, len(shard.waits), now_s, effects)
        # Each turn but the last answers a request, so this ends.
        while True:
            blocked = self._fetch_wanted(now_s, effects)
            if blocked is None or self._can_progress(now_s):
                return
            self.serve_from_memory(blocked, 1, now_s, effects)

    def _fetch_wanted(self, now_s: float, effects: list[Effect]) -> Shard | None:
        """Begin demand fetches in their order; returns the first shard for which there is no room, if any."""
        holdings = self._holdings
        self.space.claimed_bytes = 0
        free_fetches = self._options.max_fetches - holdings.num_demand_fetching
        blocked: Shard | None = None
        for shard in list(holdings.queue.values()):
            if shard.state is not ShardState.WANTED:
                continue
            if not free_fetches:
                break
            owner = shard.waits[0].session.owner
            incoming = Incoming(key=shard.key, reserve_bytes=shard.reserve_bytes, seconds=None, owner=owner)
            room = Room.NONE if blocked is not None else self.space.make(incoming, now_s, effects)
            if room is Room.READY:
                holdings.start_demand(shard, now_s)
                self.num_demand_fetches += 1
                effects.append(Fetch(key=shard.key, demand=True))
                free_fetches -= 1
                continue
            if shard.blocked_since_s is None:
                shard.blocked_since_s = now_s
            if room is Room.COMING:
                free_fetches -= 1
            elif blocked is None:
                # Those behind it wait too, or small shards would keep a large one out for ever.
                blocked = shard
        return blocked

    def _can_progress(self, now_s: float) -> bool:
        """Whether space may come free although nothing can be evicted now.

        It does when something in flight ends, or when a session that waits for nothing itself moves on. A session
        that has been silent for longer than a request's patience is not counted on.
        """
        holdings = self._holdings
        if holdings.ledger.evicting_bytes or holdings.num_fetching:
            return True
        for session in self._sessions.values():
            stuck = any(key in holdings.queue for key in session.waits.values())
            if stuck or now_s - session.seen_s >= self._options.patience_s:
                continue
            if session.leases or (session.reader is not None and len(holdings.victims)):
                return True
        return False

    def _start_prefetches(self, now_s: float, effects: list[Effect]) -> None:
        holdings, lookahead_bytes = self._holdings, self.lookahead_bytes
        free_fetches = self._options.max_fetches - holdings.num_fetching
        if free_fetches <= 0 or holdings.ahead_bytes >= lookahead_bytes or not self._horizon.has_missing:
            return
        ahead_s, least_bytes = self.ahead_s, self._likely_bytes(self._horizon.working_set_bytes)
        for missing in self._horizon.missing(now_s):
            ahead_bytes = holdings.ahead_bytes + self.space.claimed_bytes
            if missing.reserve_bytes > holdings.ledger.capacity_bytes:
                continue
            if missing.is_beyond:
                lookahead_bytes = min(lookahead_bytes, self._edge_bytes)
            with_it_bytes = ahead_bytes + self._likely_bytes(missing.reserve_bytes)
            # One shard is always allowed, however large it is.
            if ahead_bytes and with_it_bytes > lookahead_bytes:
                return
            # All shards of the next window are needed at one moment, and may begin to come when this one has begun.
            if missing.seconds > ahead_s and with_it_bytes > least_bytes:
                return
            incoming = Incoming(
                key=missing.key, reserve_bytes=missing.reserve_bytes, seconds=missing.seconds, owner=missing.owner
            )
            room = self.space.make(incoming, now_s, effects)
            if room is Room.NONE:
                return
            if room is Room.READY:
                self._keeping.adopt(missing.key, now_s)
                self._prefetch(missing, now_s, effects, is_in_window=True)
            free_fetches -= 1
            if not free_fetches:
                return

    def _fill(self, now_s: float, effects: list[Effect]) -> None:
        """Fetch shards that are to stay into space that nobody needs, while there are fetches to spare."""
        holdings = self._holdings
        if self.space.claimed_bytes or self.lookahead_bytes == 0:
            return
        spare = int(FILLING * self._options.max_fetches) - holdings.num_fetching
        while spare > 0 and (missing := self._keeping.next_to_fill(holdings.ledger.free_bytes, now_s)) is not None:
            if holdings.shares.excess_bytes(missing.owner, missing.reserve_bytes) > 0:
                return
            self._prefetch(missing, now_s, effects, is_in_window=False)
            spare -= 1

    def _trade(self, now_s: float, effects: list[Effect]) -> None:
        """Let a shard that is to pass take the place of one that stays, while the link has nothing else to do."""
        holdings = self._holdings
        if self.space.claimed_bytes or holdings.ledger.evicting_bytes or self.lookahead_bytes == 0:
            return
        most = self._options.max_fetches
        if holdings.num_fetching >= (int(FILLING * most) if self.crowd.pays else max(1, most // FEW_PART)):
            return
        trade = self._trading.next_trade(holdings.ledger.capacity_bytes, now_s)
        if trade is None:
            return
        catalog = trade.catalog
        catalog.to_fill.appendleft(trade.into)
        reserve_bytes = int(catalog.reserve_bytes[trade.into])
        holdings.trade(catalog.keys[trade.into], reserve_bytes)
        if reserve_bytes > holdings.ledger.free_bytes:
            self.space.settle(trade, now_s, effects)
        else:
            holdings.victims.relist(trade.settle(), now_s)
            self._fill(now_s, effects)

    def _prefetch(self, missing: Missing, now_s: float, effects: list[Effect], *, is_in_window: bool) -> None:
        ahead_bytes = self._likely_bytes(missing.reserve_bytes) if is_in_window else 0
        self._holdings.start_prefetch(
            missing.key, missing.reserve_bytes, now_s, ahead_bytes=ahead_bytes, owner=missing.owner
        )
        self.num_prefetches += 1
        effects.append(Fetch(key=missing.key, demand=False))
