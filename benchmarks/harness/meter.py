"""Timing one contestant, in its own process."""

from __future__ import annotations

import os
import time
import urllib.request
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import FIRST_FETCH, LONGEST_FETCH, CpuSeconds, Measurement, PeakMemory, Phase, Tally
from benchmarks.harness.processes import Snapshot, peak_rss_bytes, reset_peak_rss
from benchmarks.harness.statistics import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from benchmarks.harness.contestant import Task

SENT_BYTES_METRIC = "SeaweedFS_s3_bucket_traffic_sent_bytes_total"
_METRICS_TIMEOUT_S = 60.0
_SETTLE_S = 0.1
_MOST_LOOKS = 50
_CHECKSUM_MODULUS = 2**64


class WrongDelivery(Exception):
    """A contestant delivered other samples than it was asked for."""


class PhaseClock:
    """Runs from its construction on."""

    def __init__(self) -> None:
        self.samples = 0
        self.size_bytes = 0
        self.fetch_s: list[float] = []
        self.turning_s = 0.0
        self.epoch_s: list[float] = []
        self.marks: dict[str, float] = {}
        self.first_batch_s: float | None = None
        self._start = self._epoch_start = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Time since the phase began."""
        return time.perf_counter() - self._start

    def mark(self, name: str) -> None:
        """Take note that ``name`` has happened now."""
        self.marks[name] = self.elapsed_s

    def mark_value(self, name: str, value: float) -> None:
        """Take note of something that was counted."""
        self.marks[name] = value

    def take(
        self, loader: Iterable[Any], count: Callable[[Any], tuple[int, int]], *, step: Callable[[], None] | None = None
    ) -> None:
        """Iterate one epoch, timing each ``next()``.

        Args:
            loader: What to iterate; making its iterator counts as a part of the first wait.
            count: Samples and payload bytes of a batch.
            step: What the training loop does with a batch.
        """
        now = time.perf_counter
        fetch_s = self.fetch_s
        asked = now()
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                self.turning_s += now() - asked
                break
            got = now()
            fetch_s.append(got - asked)
            samples, size_bytes = count(batch)
            self.samples += samples
            self.size_bytes += size_bytes
            if self.first_batch_s is None:
                self.first_batch_s = got - self._start
                self.marks |= {"first_batch_samples": samples, FIRST_FETCH: got - asked}
            if step is not None:
                step()
            asked = now()
        self.end_epoch()

    def add(self, *, samples: int, size_bytes: int) -> None:
        """Count what was delivered some other way."""
        self.samples += samples
        self.size_bytes += size_bytes

    def end_epoch(self, *, passes: int = 1) -> None:
        """One pass over the data set is complete, or several that no clock looked at one by one."""
        end = time.perf_counter()
        self.epoch_s += [(end - self._epoch_start) / passes] * passes
        self._epoch_start = end


class Meter:
    """Measures the phases of this process's contestant.

    Args:
        task: What it shall deliver.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._phases: list[Phase] = []
        self._verified: Tally | None = None

    @contextmanager
    def phase(self, name: str, *, page_cache: str, expected: tuple[int, int] | None = None) -> Iterator[PhaseClock]:
        """Time what the block does.

        Args:
            name: Of the phase.
            page_cache: Which files the kernel holds in memory as it begins.
            expected: Samples and bytes of an epoch that is not a whole one.

        Raises:
            WrongDelivery: The block delivered another number of samples or bytes than its epochs have.
        """
        origin_before = self._origin_bytes()
        before = Snapshot.take()
        for pid in before.tree(os.getpid()):
            reset_peak_rss(pid)
        clock = PhaseClock()
        yield clock
        wall_s = clock.elapsed_s
        after = Snapshot.take()
        memory = self._memory(after)
        origin_after = self._settled_origin_bytes()
        self._check(name, clock, expected or (self._task.expected.samples, self._task.expected.size_bytes))
        self._phases.append(
            Phase(
                name=name,
                samples=clock.samples,
                size_bytes=clock.size_bytes,
                wall_s=wall_s,
                epoch_s=clock.epoch_s,
                first_batch_s=clock.first_batch_s,
                fetch_p50_s=percentile(clock.fetch_s, 50) if clock.fetch_s else None,
                fetch_p99_s=percentile(clock.fetch_s, 99) if clock.fetch_s else None,
                fetch_total_s=sum(clock.fetch_s) + clock.turning_s if clock.fetch_s else None,
                marks=clock.marks | ({LONGEST_FETCH: max(clock.fetch_s)} if clock.fetch_s else {}),
                cpu_s=self._cpu_s(before, after),
                peak_memory_bytes=memory,
                origin_bytes=None if origin_before is None or origin_after is None else origin_after - origin_before,
                page_cache=page_cache,
                stored_bytes=self._task.store.size_bytes if self._task.store else 0,
            )
        )

    def verify(self, samples: Iterable[tuple[str, bytes]]) -> None:
        """Compare one epoch, key by key and byte by byte, with what was packed.

        Raises:
            WrongDelivery: It is not the same.
        """
        count = size_bytes = checksum = 0
        for key, payload in samples:
            count += 1
            size_bytes += len(payload)
            checksum += sample_checksum(key, payload)
        delivered = Tally(samples=count, size_bytes=size_bytes, checksum=checksum % _CHECKSUM_MODULUS)
        if delivered != self._task.expected:
            raise WrongDelivery(f"the verification pass delivered {delivered}, packed were {self._task.expected}")
        self._verified = delivered

    def measurement(self, configuration: dict[str, Any]) -> Measurement:
        """What was measured.

        Raises:
            WrongDelivery: Nothing was verified.
        """
        if self._verified is None:
            raise WrongDelivery("the contestant's samples were never compared with those that were packed")
        return Measurement(phases=self._phases, verified=self._verified, configuration=configuration)

    def _check(self, name: str, clock: PhaseClock, of_each: tuple[int, int]) -> None:
        epochs = len(clock.epoch_s)
        expected = (epochs * of_each[0], epochs * of_each[1])
        if not epochs or (clock.samples, clock.size_bytes) != expected:
            raise WrongDelivery(
                f"{epochs} epochs of phase {name} delivered {clock.samples} samples of {clock.size_bytes} bytes; "
                f"{expected[0]} samples of {expected[1]} bytes were asked for"
            )

    def _cpu_s(self, before: Snapshot, after: Snapshot) -> CpuSeconds:
        def spent(of: Callable[[Snapshot], set[int]]) -> float:
            return after.cpu_s(of(after)) - before.cpu_s(of(before))

        client = spent(lambda snapshot: snapshot.by_session(os.getpid())[0])
        daemon = spent(lambda snapshot: snapshot.by_session(os.getpid())[1])
        server = spent(lambda snapshot: snapshot.tree(self._task.server_pid)) if self._task.server_pid else 0.0
        busy = after.busy_s - before.busy_s
        return CpuSeconds(
            client=client,
            daemon=daemon,
            server=server,
            other=max(0.0, busy - client - daemon - server),
            interrupts=after.interrupts_s - before.interrupts_s,
            steal=after.steal_s - before.steal_s,
        )

    def _memory(self, snapshot: Snapshot) -> PeakMemory:
        own, detached = snapshot.by_session(os.getpid())
        workers = own - {os.getpid()}
        return PeakMemory(
            main=peak_rss_bytes(os.getpid()),
            worker=max(map(peak_rss_bytes, workers), default=0),
            daemon=sum(map(peak_rss_bytes, detached)),
        )

    def _settled_origin_bytes(self) -> int | None:
        """The store counts a body only once it has sent all of it, and whoever got it may ask before that."""
        found = self._origin_bytes()
        for _ in range(_MOST_LOOKS if found is not None else 0):
            before = found
            time.sleep(_SETTLE_S)
            found = self._origin_bytes()
            if found == before:
                break
        return found

    def _origin_bytes(self) -> int | None:
        if not self._task.metrics_url:
            return None
        with urllib.request.urlopen(self._task.metrics_url, timeout=_METRICS_TIMEOUT_S) as response:
            text = response.read().decode()
        values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(SENT_BYTES_METRIC)]
        return int(sum(values))


def sample_checksum(key: str, payload: bytes) -> int:
    """Checksum of one sample; see ``Tally``."""
    return zlib.crc32(payload, zlib.crc32(key.encode()))
