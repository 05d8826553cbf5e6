"""The daemon at its work and at rest: all shards of a data set into its cache, in the order that a reader wants."""

from __future__ import annotations

import io
import os
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.processes import Snapshot, context_switches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter


_SETTLE_S = 30.0
_STILL_S = 1.0


class WarmUp:
    """A session without a loader: it announces its plan, leases one shard after the other, and reads none of them.

    Args:
        idle_s: How long to watch the daemon afterwards while nothing is asked of it; 0 for not at all.
    """

    idle_timeout_s = 60.0
    """Of the private daemon."""

    def __init__(self, *, idle_s: float = 0.0) -> None:
        self._idle_s = idle_s

    def prepare(self, task: Task) -> None:
        """Start the daemon and its index process, and open the data set."""
        from cacheloader.config import TransportOptions
        from cacheloader.protocol.messages import DatasetSpec
        from cacheloader.transport.open import open_transport

        origin = task.origin()
        spec = DatasetSpec(
            urls=[f"s3://{origin.bucket}/{origin.prefix}"],
            storage_options=origin.storage_options,
        )
        options = TransportOptions(
            cache_dir=Path(task.folder, "cache"),
            cache_size=4 * sum(task.shard_bytes),
            idle_timeout_s=self.idle_timeout_s,
        )
        self._transport = open_transport(options)
        self._manifest = self._transport.open_dataset(spec)
        self._settle()

    def run(self, task: Task, meter: Meter) -> Measurement:
        """Lease every shard once; the first lease counts as the first batch."""
        with meter.phase("cold", page_cache="empty cache; the store's files in memory") as clock:
            for shard in self._shards():
                if clock.first_batch_s is None:
                    clock.first_batch_s = clock.elapsed_s
                clock.add(samples=int(self._manifest.num_samples[shard]), size_bytes=0)
            clock.add(samples=0, size_bytes=task.expected.size_bytes)
            clock.end_epoch()
        configuration = {"daemon": "private, defaults; started, at rest, and the data set opened before the clock"}
        if self._idle_s:
            configuration["at rest, one client connected"] = self._rest()
        meter.verify(self._samples())
        self._transport.close()
        if self._idle_s:
            configuration["at rest, no client"] = self._rest()
        return meter.measurement(configuration)

    def _settle(self) -> None:
        """Return when the daemon and its index process, whose start nobody waits for, have nothing left to do."""
        deadline = time.monotonic() + _SETTLE_S
        before = -1.0
        while time.monotonic() < deadline:
            now = Snapshot.take()
            daemon = now.by_session(os.getpid())[1]
            if len(daemon) > 1 and now.cpu_s(daemon) == before:
                return
            before = now.cpu_s(daemon)
            time.sleep(_STILL_S)

    def _shards(self) -> Iterator[int]:
        import numpy as np

        from cacheloader.transport.base import AccessPlan

        rows = np.concatenate([[0], np.cumsum(self._manifest.num_samples)]).astype(np.int64)
        shards = np.arange(len(self._manifest), dtype=np.int32)
        self._transport.follow(AccessPlan(first_clock=rows[:-1], stop_clock=rows[1:], shard=shards, clock=0))
        for shard in shards.tolist():
            lease = self._transport.acquire(shard)
            yield shard
            lease.release()
            self._transport.advance(int(rows[shard + 1]))

    def _samples(self) -> Iterator[tuple[str, bytes]]:
        for shard in range(len(self._manifest)):
            lease = self._transport.acquire(shard)
            with tarfile.open(fileobj=io.BytesIO(lease.read(0, lease.size_bytes))) as tar:
                for member in tar:
                    content: Any = tar.extractfile(member)
                    yield member.name.partition(".")[0], content.read()
            lease.release()

    def _rest(self) -> str:
        """Wake-ups a second of all threads of the daemon and its index process, and their CPU time."""
        time.sleep(1.0)  # what the last call began has ended
        before, asleep = Snapshot.take(), self._switches()
        time.sleep(self._idle_s)
        after, again = Snapshot.take(), self._switches()
        daemon = before.by_session(os.getpid())[1]
        cpu_s = after.cpu_s(daemon) - before.cpu_s(daemon)
        rate = self.wake_ups(asleep, again) / self._idle_s
        return f"{rate:.2f} wake-ups/s and {cpu_s:.2f} s of CPU in {self._idle_s:g} s"

    def wake_ups(self, before: dict[int, int], after: dict[int, int]) -> int:
        """Between two counts of each thread's switches."""
        # Threads that have ended meanwhile are not in the second count; one wake-up each is what that takes.
        ended = len(before.keys() - after.keys())
        return ended + sum(count - before.get(thread, 0) for thread, count in after.items())

    def _switches(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for pid in Snapshot.take().by_session(os.getpid())[1]:
            found |= context_switches(pid)
        return found
