"""A modelled origin: a wait for the first byte, then a link that all fetches share evenly."""

from __future__ import annotations

from heapq import heappop, heappush
from math import exp, inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from cacheloader_daemon.simulator.settings import Settings

P95_SIGMAS = 1.6448536269514722
"""The 95th percentile of a normal distribution, in standard deviations."""


class ModelOrigin:
    """Fetches under way. Time is what it is told.

    Args:
        settings: Link and latency.
        generator: Draws the latencies.

    Attributes:
        sent_bytes: Sent so far, whole shards.
        num_requests: Asked for, second requests included.
    """

    def __init__(self, settings: Settings, generator: np.random.Generator) -> None:
        self._settings = settings
        self._generator = generator
        self._number = 0
        self._coming: list[tuple[float, int, object]] = []
        """When the first byte comes."""
        self._checking: list[tuple[float, int, object]] = []
        """When the shard may be read."""
        self._left_bytes: dict[tuple[int, object], float] = {}
        self._now_s = 0.0
        self.sent_bytes = 0
        self.num_requests = 0

    def ask(self, what: object, now_s: float) -> None:
        """Begin to fetch one shard; ``what`` names it."""
        self._flow(now_s)
        self._number += 1
        heappush(self._coming, (now_s + self._latency_s(), self._number, what))

    @property
    def next_s(self) -> float:
        """When something happens next, infinite if nothing is under way."""
        coming_s = self._coming[0][0] if self._coming else inf
        checked_s = self._checking[0][0] if self._checking else inf
        arrives_s = self._now_s + min(self._left_bytes.values()) / self._rate if self._left_bytes else inf
        return min(coming_s, checked_s, arrives_s)

    def advance(self, now_s: float) -> list[object]:
        """Let time pass, no farther than ``next_s``; returns what can be read now."""
        self._flow(now_s)
        for number, what in [fetch for fetch, left_bytes in self._left_bytes.items() if left_bytes <= 0.5]:
            del self._left_bytes[number, what]
            self.sent_bytes += self._settings.shard_bytes
            heappush(self._checking, (now_s + self._settings.check_s, number, what))
        while self._coming and self._coming[0][0] <= now_s:
            _, number, what = heappop(self._coming)
            self._left_bytes[number, what] = float(self._settings.shard_bytes)
        arrived = []
        while self._checking and self._checking[0][0] <= now_s:
            arrived.append(heappop(self._checking)[2])
        return arrived

    @property
    def _rate(self) -> float:
        share = self._settings.bandwidth_bytes_per_s / len(self._left_bytes)
        return min(share, self._settings.stream_bytes_per_s or inf)

    def _flow(self, now_s: float) -> None:
        if self._left_bytes and now_s > self._now_s:
            # Rounding must not leave a byte whose time is too short to be told apart from now.
            flown_bytes = (now_s - self._now_s) * self._rate
            for fetch in self._left_bytes:
                self._left_bytes[fetch] -= flown_bytes
        self._now_s = max(now_s, self._now_s)

    def _latency_s(self) -> float:
        settings = self._settings
        self.num_requests += 1
        latency_s = self._draw_s()
        late_s = settings.latency_s * exp(P95_SIGMAS * settings.latency_sigma)
        if settings.hedge and latency_s > late_s:
            self.num_requests += 1
            return min(latency_s, late_s + self._draw_s())
        return latency_s

    def _draw_s(self) -> float:
        settings = self._settings
        if settings.late_share and self._generator.random() < settings.late_share:
            return settings.late_s
        return settings.latency_s * exp(settings.latency_sigma * float(self._generator.standard_normal()))
