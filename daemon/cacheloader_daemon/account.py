"""What the daemon has done so far: plain counters, changed on the loop's thread, read as one frozen record."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BATCH_WAIT_EDGES_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
SHARD_FETCH_EDGES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class HistogramRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram at one moment.

    Attributes:
        edges: Upper edges of the buckets, inclusive; one more bucket holds what is above the last.
        counts: Values in each bucket, one more than ``edges``; not cumulative.
        total: Sum of all values.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


class Histogram:
    """Counts values in fixed buckets."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = tuple(edges)
        self._counts = [0] * (len(self._edges) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(self._edges, value)] += 1
        self._total += value

    def record(self) -> HistogramRecord:
        """The histogram at this moment."""
        return HistogramRecord(edges=self._edges, counts=tuple(self._counts), total=self._total)


class AccountRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All counters at one moment, since the daemon's start.

    Attributes:
        disk_troubles: Times that the cache's disk failed a call.
        remote_read_bytes: Bytes of fetched shards, by reason: ``demand``, ``prefetch``, ``bypass``.
        fetch_failures: Fetches that ended without a shard, by error class.
        samples: Samples that training loops took.
        invalid_reports: Reports of clients that held numbers which are no waiting times.
        fallbacks: Times that a session found this daemon hanging or gone and read the origin itself.
        away_seconds: For how long, over all sessions.
        shard_fetch_s: Seconds from a fetch's start to its end, for shards that arrived.
        batch_wait_s: Seconds that training threads waited inside ``next(loader)``.
    """

    disk_troubles: int
    remote_read_bytes: Mapping[str, int]
    fetch_failures: Mapping[str, int]
    samples: int
    invalid_reports: int
    fallbacks: int
    away_seconds: float
    shard_fetch_s: HistogramRecord
    batch_wait_s: HistogramRecord


@dataclass(slots=True, kw_only=True)
class Account:
    """The counters; the fields mean what they mean in ``AccountRecord``."""

    disk_troubles: int = 0
    disk_trouble_s: float | None = None
    """Time of the loop at the last of them."""
    remote_read_bytes: Counter[str] = field(default_factory=lambda: Counter(demand=0, prefetch=0, bypass=0))
    fetch_failures: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    invalid_reports: int = 0
    fallbacks: int = 0
    away_seconds: float = 0.0
    shard_fetch_s: Histogram = field(default_factory=lambda: Histogram(SHARD_FETCH_EDGES_S))
    batch_wait_s: Histogram = field(default_factory=lambda: Histogram(BATCH_WAIT_EDGES_S))

    def reported(self, waits_s: Iterable[float], samples: int) -> None:
        """Count what a training thread saw; one client's nonsense must not spoil the sums of all."""
        waits = list(waits_s)
        if samples < 0 or not all(0 <= wait < math.inf for wait in waits):
            self.invalid_reports += 1
            return
        self.samples += samples
        for wait in waits:
            self.batch_wait_s.add(wait)

    def missed(self, fallbacks: int, away_seconds: float) -> None:
        """Count that a session could not reach this daemon, as the session reports it."""
        if fallbacks < 0 or not 0 <= away_seconds < math.inf:
            self.invalid_reports += 1
            return
        self.fallbacks += fallbacks
        self.away_seconds += away_seconds

    def disk_failed(self, now_s: float) -> None:
        """Count a failed call to the cache's disk."""
        self.disk_troubles += 1
        self.disk_trouble_s = now_s

    def record(self) -> AccountRecord:
        """All counters at this moment."""
        return AccountRecord(
            disk_troubles=self.disk_troubles,
            remote_read_bytes=dict(self.remote_read_bytes),
            fetch_failures=dict(self.fetch_failures),
            samples=self.samples,
            invalid_reports=self.invalid_reports,
            fallbacks=self.fallbacks,
            away_seconds=self.away_seconds,
            shard_fetch_s=self.shard_fetch_s.record(),
            batch_wait_s=self.batch_wait_s.record(),
        )
