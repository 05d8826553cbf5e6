"""The whole daemon at one moment, as a record, as JSON for ``GetStatus`` and as families of metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from cacheloader_daemon.exposition import MetricsText, by

if TYPE_CHECKING:
    from collections.abc import Collection

    from cacheloader.origin.slots import SlotStatistics
    from cacheloader_daemon.account import AccountRecord
    from cacheloader_daemon.arrivals import OriginTrouble
    from cacheloader_daemon.plan.options import PlannerStatistics
    from cacheloader_daemon.runtime import SessionRecord
    from cacheloader_daemon.store import DirectoryStatus
    from cacheloader_daemon.tenants import Visitor


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be asked of a daemon.

    Attributes:
        version: Of the package.
        pid: Its process.
        private: Whether it serves one user.
        cache_dir: Where the cache lies.
        uptime_s: Seconds since it was ready.
        cpu_s: Processor time of its process, without the index workers.
        index_cpu_s: Processor time of index workers that have ended.
        connections: Clients connected now.
        degraded: Why the cache does less than it should; empty if it does not.
        workers_lost: Index workers that ended before they answered.
        plan: What the cache holds, and what was decided; its quota is what the disks allow now.
        directories: The cache's directories, and how each of them is.
        scrubbed_bytes: Bytes of the cache that were read again to find damage.
        transfers: Requests to origins now.
        origin_troubles: Stores that have failed since they last delivered a shard.
        account: Counters since the start.
        sessions: What is being read, at most ``MAX_SESSIONS``.
    """

    version: str
    pid: int
    private: bool
    cache_dir: str
    uptime_s: float
    cpu_s: float
    index_cpu_s: float
    connections: int
    degraded: tuple[str, ...]
    workers_lost: int
    plan: PlannerStatistics
    directories: tuple[DirectoryStatus, ...]
    scrubbed_bytes: int
    transfers: SlotStatistics
    origin_troubles: tuple[OriginTrouble, ...]
    account: AccountRecord
    sessions: tuple[SessionRecord, ...]


DEGRADED_REASONS = ("disk", "origin", "space")

CONDITIONS = ("well", "read-only", "failing", "gone", "unusable")

MAX_SESSIONS = 1000


def seen_by(visitor: Visitor | None, status: DaemonStatus, *, administrators: Collection[int]) -> DaemonStatus:
    """``status`` as a client of a shared daemon may see it: what others read is not his to know.

    Args:
        visitor: The client; ``None`` for the one user of a private daemon.
        status: All of it.
        administrators: Users who see all.
    """
    if visitor is None or visitor.uid in administrators:
        return status
    sessions = tuple(one if one.uid == visitor.uid else msgspec.structs.replace(one, uri="") for one in status.sessions)
    return msgspec.structs.replace(status, sessions=sessions, origin_troubles=())


def as_json(status: DaemonStatus) -> bytes:
    """One JSON object; the fields are those of the records."""
    return msgspec.json.encode(status)


def as_metrics(status: DaemonStatus) -> str:
    """The Prometheus exposition."""
    plan, account, text = status.plan, status.account, MetricsText()
    text.gauge("cacheloader_build_info", "Version of the daemon.", {(("version", status.version),): 1})
    text.gauge("cacheloader_uptime_seconds", "Time since the daemon was ready.", status.uptime_s)
    text.counter("process_cpu_seconds_total", "Processor time of the daemon.", status.cpu_s)
    text.gauge("cacheloader_connections", "Clients connected.", status.connections)
    text.gauge("cacheloader_sessions", "Data sets open, those of scans included.", plan.sessions)
    text.gauge(
        "cacheloader_degraded",
        "Whether the cache does less than it should, by reason.",
        by("reason", {reason: int(reason in status.degraded) for reason in DEGRADED_REASONS}),
    )
    text.counter("cacheloader_disk_troubles_total", "Failed calls to the cache's disk.", account.disk_troubles)
    conditions = Counter(one.condition for one in status.directories)
    text.gauge(
        "cacheloader_cache_directories",
        "Directories of the cache, by what they do.",
        by("condition", {condition: conditions[condition] for condition in CONDITIONS}),
    )
    stores = [one.store for one in status.directories if one.store is not None]
    text.counter(
        "cacheloader_damaged_blobs_total",
        "Shards whose bytes on disk were found to be others than were stored, or unreadable.",
        sum(store.damaged for store in stores),
    )
    text.gauge(
        "cacheloader_suspect_shards",
        "Shards that are verified before they are used, since power has failed.",
        sum(store.suspect_blobs for store in stores),
    )
    text.gauge(
        "cacheloader_quarantine_bytes",
        "Damaged shards that are kept for inspection.",
        sum(store.quarantined_bytes for store in stores),
    )
    text.counter("cacheloader_scrubbed_bytes_total", "Bytes read again to find damage.", status.scrubbed_bytes)
    text.counter("cacheloader_index_workers_lost_total", "Index workers that died at work.", status.workers_lost)

    text.counter("cacheloader_cache_hits_total", "Shards that were in the cache when asked for.", plan.hits)
    text.counter("cacheloader_cache_misses_total", "Shards that were neither there nor on their way.", plan.misses)
    text.counter(
        "cacheloader_requests_total",
        "Shards asked for, by result.",
        by(
            "result",
            {
                "hit": plan.hits,
                "miss": plan.misses,
                "coalesced": plan.coalesced,
                "bypass": plan.memory_serves,
                "refused": plan.refusals,
            },
        ),
    )
    text.gauge(
        "cacheloader_waiting_requests",
        "Requests without an answer, by what they wait for.",
        by("for", {"fetch": plan.waiting_requests - plan.blocked_requests, "space": plan.blocked_requests}),
    )
    text.counter(
        "cacheloader_remote_read_bytes_total",
        "Bytes of shards read from origins, by reason.",
        by("reason", account.remote_read_bytes),
    )
    text.counter(
        "cacheloader_fetches_total",
        "Fetches begun, by reason.",
        by("reason", {"demand": plan.demand_fetches, "prefetch": plan.prefetches}),
    )
    text.counter("cacheloader_promoted_fetches_total", "Prefetches that somebody came to wait for.", plan.promoted)
    text.counter(
        "cacheloader_fetch_failures_total",
        "Fetches that ended without a shard, by error.",
        by("error", account.fetch_failures),
    )
    text.histogram("cacheloader_fetch_duration_seconds", "Time to bring one shard.", account.shard_fetch_s)
    text.gauge("cacheloader_origin_requests", "Requests to origins in flight.", status.transfers.requests)
    text.gauge("cacheloader_origin_requests_waiting", "Requests that wait for a slot.", status.transfers.waiting)
    text.counter(
        "cacheloader_origin_throttled_total", "Answers that asked to slow down.", status.transfers.throttled_total
    )

    hedges = status.transfers.hedges
    text.counter("cacheloader_origin_range_requests_total", "Ranges asked of origins.", hedges.requests)
    text.counter(
        "cacheloader_origin_hedges_total",
        "Ranges asked a second time because the first request was late, by whether that was faster.",
        by("result", {"won": hedges.won, "lost": hedges.hedges - hedges.won}),
    )
    text.counter("cacheloader_origin_hedged_bytes_total", "Bytes asked a second time.", hedges.hedged_bytes)
    text.gauge(
        "cacheloader_origin_failures",
        "Requests that failed since the store last delivered a shard.",
        by("origin", {trouble.origin: trouble.failures for trouble in status.origin_troubles}),
    )
    text.counter(
        "cacheloader_client_fallbacks_total",
        "Times that a session found this daemon hanging or gone and read the origin itself.",
        account.fallbacks,
    )
    text.counter(
        "cacheloader_client_away_seconds_total",
        "For how long sessions read the origin themselves.",
        account.away_seconds,
    )

    text.gauge(
        "cacheloader_store_bytes",
        "Bytes of the cache's disk, by state; together they stay below the limit.",
        by(
            "state",
            {
                "committed": plan.resident_bytes,
                "inflight": plan.reserved_bytes,
                "evicting": plan.evicting_bytes,
                "unlinked_open": plan.unlinked_bytes,
                "overhead": plan.overhead_bytes,
            },
        ),
    )
    if plan.owner_bytes:
        text.gauge(
            "cacheloader_tenant_store_bytes",
            "Blobs and downloads that count for a tenant.",
            by("tenant", plan.owner_bytes),
        )
    text.gauge("cacheloader_store_limit_bytes", "What the cache may hold.", plan.quota_bytes)
    text.gauge("cacheloader_lookahead_bytes", "Bytes fetched ahead and not used yet.", plan.ahead_bytes)
    text.gauge("cacheloader_lookahead_limit_bytes", "Bound of the bytes fetched ahead.", plan.lookahead_bytes)
    text.gauge(
        "cacheloader_lookahead_seconds",
        "What is needed within this time is fetched ahead; 0 until fetches have shown how long they take.",
        plan.lookahead_s,
    )
    text.gauge("cacheloader_kept_bytes", "Of the shards that stay from epoch to epoch.", plan.kept_bytes)
    text.gauge(
        "cacheloader_epoch_minimum_bytes",
        "What the planned shards exceed the cache by: no policy fetches less for each reading.",
        plan.least_bytes,
    )
    text.gauge(
        "cacheloader_shards",
        "Shards, by state.",
        by("state", {"resident": plan.resident_shards, "leased": plan.leased_shards, "fetching": plan.fetching_shards}),
    )
    text.counter("cacheloader_evictions_total", "Shards dropped to make room.", plan.evictions)
    text.counter("cacheloader_lost_blobs_total", "Shards that vanished from the disk or were damaged.", plan.lost_blobs)
    text.counter(
        "cacheloader_unused_prefetch_bytes_total", "Bytes fetched ahead and evicted unused.", plan.unused_prefetch_bytes
    )

    text.histogram(
        "cacheloader_fetch_seconds", "Time a training thread waited inside next(loader).", account.batch_wait_s
    )
    text.counter("cacheloader_samples_total", "Samples that training loops took.", account.samples)
    text.counter("cacheloader_invalid_reports_total", "Reports that held no waiting times.", account.invalid_reports)
    return text.text()
