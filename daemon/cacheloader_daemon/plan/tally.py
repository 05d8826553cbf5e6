"""What has happened since the start, and the numbers that people see of it and of what the cache holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from cacheloader_daemon.plan.horizon import INFINITE
from cacheloader_daemon.plan.options import PlannerStatistics
from cacheloader_daemon.plan.states import ShardState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cacheloader_daemon.plan.admission import Admission
    from cacheloader_daemon.plan.holdings import Holdings
    from cacheloader_daemon.plan.readers import Session

USED_STEPS = 64
"""How finely it is told apart what part of its reservation a shard really takes: it is an average, and wavers."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of events; the names are those of ``PlannerStatistics``."""

    hits: int = 0
    misses: int = 0
    coalesced: int = 0
    promoted: int = 0
    lost: int = 0
    fetched_bytes: int = 0
    fetched_reservations_bytes: int = 0
    failed: int = 0
    refusals: int = 0

    def fetched(self, *, used_bytes: int, reserve_bytes: int) -> float:
        """A fetch has ended well; returns what part of their reservations shards take on average."""
        self.fetched_bytes += used_bytes
        self.fetched_reservations_bytes += reserve_bytes
        return ceil(USED_STEPS * self.fetched_bytes / self.fetched_reservations_bytes) / USED_STEPS

    def statistics(
        self,
        holdings: Holdings,
        admission: Admission,
        sessions: Mapping[int, Session],
        *,
        kept_bytes: int,
        least_bytes: int,
    ) -> PlannerStatistics:
        """All numbers, as they are now."""
        ledger = holdings.ledger
        states = Counter(shard.state for shard in holdings.shards.values())
        return PlannerStatistics(
            quota_bytes=ledger.quota_bytes,
            overhead_bytes=ledger.overhead_bytes,
            resident_bytes=ledger.resident_bytes,
            reserved_bytes=ledger.reserved_bytes,
            evicting_bytes=ledger.evicting_bytes,
            unlinked_bytes=ledger.unlinked_bytes,
            ahead_bytes=holdings.ahead_bytes,
            lookahead_bytes=admission.lookahead_bytes,
            lookahead_s=0.0 if admission.ahead_s == INFINITE else admission.ahead_s,
            kept_bytes=kept_bytes,
            least_bytes=least_bytes,
            resident_shards=states[ShardState.RESIDENT],
            leased_shards=states[ShardState.RESIDENT] - len(holdings.victims),
            fetching_shards=holdings.num_fetching,
            sessions=len(sessions),
            waiting_requests=sum(len(session.waits) for session in sessions.values()),
            blocked_requests=sum(len(shard.waits) for shard in holdings.queue.values()),
            hits=self.hits,
            misses=self.misses,
            coalesced=self.coalesced,
            demand_fetches=admission.num_demand_fetches,
            prefetches=admission.num_prefetches,
            promoted=self.promoted,
            evictions=admission.space.num_evictions,
            unused_prefetch_bytes=admission.space.unused_prefetch_bytes,
            lost_blobs=self.lost,
            fetched_bytes=self.fetched_bytes,
            failed_fetches=self.failed,
            memory_serves=admission.num_memory_serves,
            refusals=self.refusals,
            owner_bytes=holdings.shares.by_owner(),
        )
