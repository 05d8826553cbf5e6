"""The daemon at rest: how often is it woken, and what does it compute, while nobody asks for anything?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.contestants.warm_up import WarmUp
from benchmarks.harness.measurement import WAKE_UPS

if TYPE_CHECKING:
    from benchmarks.harness.contestant import Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter

FLUSHED_S = 45.0
"""The daemon brings shards to the disk half a minute after the last one came, which is work and no rest."""


class Resting(WarmUp):
    """A session that has read everything, and then asks for nothing more.

    Args:
        idle_s: How long the daemon is watched.
        is_connected: Whether the client stays.
    """

    idle_timeout_s = 600.0
    """So that a private daemon does not leave while it is watched."""

    def __init__(self, *, idle_s: float, is_connected: bool) -> None:
        super().__init__(idle_s=idle_s)
        self._is_connected = is_connected

    def run(self, task: Task, meter: Meter) -> Measurement:  # noqa: ARG002  (nothing is delivered by the clock)
        """Fetch everything, then watch."""
        samples = list(self._samples())
        if not self._is_connected:
            self._transport.close()
        self._settle()
        time.sleep(min(self._idle_s, FLUSHED_S))
        with meter.phase("rest", page_cache="of no account", expected=(0, 0)) as clock:
            asleep = self._switches()
            time.sleep(self._idle_s)
            clock.mark_value(WAKE_UPS, self.wake_ups(asleep, self._switches()))
            clock.end_epoch()
        meter.verify(samples)
        if self._is_connected:
            self._transport.close()
        return meter.measurement({"daemon": "private, defaults, idle timeout 600 s; every shard cached"})
