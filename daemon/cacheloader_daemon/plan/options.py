"""What the planner can be told, and what it tells about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cacheloader.errors import ConfigError
from cacheloader.quantity import format_size
from cacheloader_daemon.plan.shares import ShareOptions

if TYPE_CHECKING:
    from collections.abc import Mapping


class PlannerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the cache is shared out.

    Attributes:
        quota_bytes: Everything the cache directory may hold: blobs, downloads in flight, unlinked blobs that are still
            open, and the overhead.
        max_fetches: Shards in flight at once before no further prefetch starts. Demands count by themselves, so that a
            waiting reader never queues behind prefetches: at worst twice as many are in flight.
        lookahead_bytes: Bound of the bytes that are fetched ahead and not used yet. ``None``: what keeps
            ``max_fetches`` busy through slow answers, up to a small part of the quota; at least one window of every
            plan and some shards. Within it, what is needed before the slowest of a thousand fetches would have ended.
        patience_s: How long a request waits for space that others hold before it is served from memory.
        retry_s: Rest of a shard whose prefetch failed; doubles with each failure in a row.
        eviction: ``"plan"``, or ``"lru"`` to ignore all plans: nothing is fetched ahead, and the blob used longest ago
            goes first. It is there to compare with.
        shares: What the owners of sessions are guaranteed and may hold; by default nobody is told apart.
    """

    quota_bytes: int
    max_fetches: int = 8
    lookahead_bytes: int | None = None
    patience_s: float = 5.0
    retry_s: float = 5.0
    eviction: str = "plan"
    shares: ShareOptions = msgspec.field(default_factory=ShareOptions)

    def __post_init__(self) -> None:
        for name, smallest in (("quota_bytes", 1), ("max_fetches", 1), ("patience_s", 0), ("retry_s", 0)):
            if getattr(self, name) < smallest:
                raise ConfigError(f"{name}={getattr(self, name)} is below {smallest}")
        if self.lookahead_bytes is not None and self.lookahead_bytes < 0:
            raise ConfigError(f"lookahead_bytes={self.lookahead_bytes} is negative; pass 0 for no prefetch")
        if self.eviction not in {"plan", "lru"}:
            raise ConfigError(f"eviction={self.eviction!r} is none of plan, lru")


GROWTH = 1 / 8
"""Part of the daemon's own files that is kept free for their growth when the first plan of a job is taken: a job that
was let in must not be turned away in a later epoch. In a trial of some epochs they grew by a twenty-fifth."""


class WorkingSet(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a plan needs at one moment, beside what there is.

    Attributes:
        peak_bytes: Reservations of all shards that are needed at ``peak_clock``.
        peak_clock: Row at which the plan needs most.
        num_shards: Shards needed at that row.
        quota_bytes: The quota.
        overhead_bytes: What the index, manifests and logs take of it.
    """

    peak_bytes: int
    peak_clock: int
    num_shards: int
    quota_bytes: int
    overhead_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the quota can hold the shards that the plan needs at once, for as long as the job runs."""
        return self.peak_bytes + self.overhead_bytes + self._growth_bytes <= self.quota_bytes

    @property
    def _growth_bytes(self) -> int:
        return int(self.overhead_bytes * GROWTH)

    @property
    def shortfall(self) -> str:
        """One sentence with the arithmetic, for ``QuotaTooSmall``."""
        own_bytes = self.overhead_bytes + self._growth_bytes
        needed = self.peak_bytes + own_bytes
        return (
            f"the cache may hold {format_size(self.quota_bytes)} and this data set needs {format_size(needed)} at "
            f"once: {self.num_shards} shards of one window, {format_size(self.peak_bytes)} with their indexes (at row "
            f"{self.peak_clock}), and {format_size(own_bytes)} for the cache's own index; pass a cache_size "
            f"of at least {needed + self._growth_bytes} bytes, better twice that, or a smaller shuffle_window"
        )


class PlannerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache holds now, and what has happened since the start.

    Attributes:
        quota_bytes: The quota.
        overhead_bytes: Index, manifests and logs.
        resident_bytes: Committed blobs.
        reserved_bytes: Set aside for shards in flight.
        evicting_bytes: Blobs that are to be unlinked.
        unlinked_bytes: Blobs without a file that a lease keeps on disk.
        ahead_bytes: Of resident and reserved bytes: fetched ahead and not used yet.
        lookahead_bytes: Bound of ``ahead_bytes`` (one shard may exceed it).
        lookahead_s: What is needed within this time is fetched ahead; 0 until fetches have shown how long they take.
        kept_bytes: Reservations of the shards that stay from epoch to epoch.
        least_bytes: Of the shards that plans name, what the cache cannot hold: no policy fetches less for each reading.
        resident_shards: Committed blobs.
        leased_shards: Of them, those with a lease.
        fetching_shards: Shards in flight.
        sessions: Open sessions.
        waiting_requests: Requests without an answer.
        blocked_requests: Of them, those that wait for space or a free fetch.
        hits: Requests granted at once.
        misses: Requests for a shard that was neither there nor on its way.
        coalesced: Requests that joined a fetch in flight or a request in the queue.
        demand_fetches: Fetches begun because somebody waited.
        prefetches: Fetches begun ahead.
        promoted: Prefetches that somebody waited for before they were finished.
        evictions: Blobs chosen as victims.
        unused_prefetch_bytes: Blobs fetched ahead that were evicted unused.
        lost_blobs: Blobs that vanished without having been evicted.
        fetched_bytes: Bytes on disk of all finished fetches.
        failed_fetches: Fetches that ended without a blob.
        memory_serves: Requests answered from memory.
        refusals: Requests refused since their fetch failed.
        owner_bytes: By owner, blobs and reservations that count for him.
    """

    quota_bytes: int
    overhead_bytes: int
    resident_bytes: int
    reserved_bytes: int
    evicting_bytes: int
    unlinked_bytes: int
    ahead_bytes: int
    lookahead_bytes: int
    lookahead_s: float
    kept_bytes: int
    least_bytes: int
    resident_shards: int
    leased_shards: int
    fetching_shards: int
    sessions: int
    waiting_requests: int
    blocked_requests: int
    hits: int
    misses: int
    coalesced: int
    demand_fetches: int
    prefetches: int
    promoted: int
    evictions: int
    unused_prefetch_bytes: int
    lost_blobs: int
    fetched_bytes: int
    failed_fetches: int
    memory_serves: int
    refusals: int
    owner_bytes: Mapping[str, int] = msgspec.field(default_factory=dict)
