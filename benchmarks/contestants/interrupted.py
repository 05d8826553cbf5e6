"""What an interruption costs: the daemon is killed in the middle of an epoch, or the job ends there and goes on."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contestants.cacheloader import CacheloaderLoader

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter

_CREDENTIALS = "3i"


class Killed:
    """A cold and a warm epoch; the daemon dies after so many steps of each.

    Args:
        step_s: Time of a step.
        after_steps: When it is killed; 0 for never.
    """

    def __init__(self, *, step_s: float, after_steps: int = 0) -> None:
        self._loader = CacheloaderLoader()
        self._step_s = step_s
        self._after_steps = after_steps

    def prepare(self, task: Task) -> None:
        """Import."""
        self._loader.prepare(task)

    def run(self, task: Task, meter: Meter) -> Measurement:
        """Cold, warm, verified."""
        with meter.phase("cold", page_cache="empty cache; the store's files in memory") as clock:
            batches = self._loader.open(task, clock)
            clock.take(batches, self._loader.count, step=self._step(task))
        with meter.phase("warm", page_cache="cached files in memory, as the epoch before left them") as clock:
            clock.take(batches, self._loader.count, step=self._step(task))
        meter.verify(item for batch in batches for item in self._loader.items(batch))
        killed = f"after {self._after_steps} steps of each epoch" if self._after_steps else "never"
        step = f"{self._step_s * 1e3:g} ms asleep"
        return meter.measurement(self._loader.configuration | {"step": step, "daemon killed": killed})

    def _step(self, task: Task) -> Callable[[], None]:
        left = self._after_steps

        def step() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(daemon_pid(Path(task.folder, "cache")), signal.SIGKILL)
            time.sleep(self._step_s)

        return step


class Resumed:
    """Half an epoch, then all of it ends, the daemon too; then a new data set and loader that go on from there."""

    def __init__(self) -> None:
        self._loader = CacheloaderLoader()

    def prepare(self, task: Task) -> None:
        """Import, and read an epoch, so that the rest of it is cached."""
        self._loader.prepare(task)

    def run(self, task: Task, meter: Meter) -> Measurement:
        """A whole epoch, which fills the cache; then half of the next; then the other half, by other objects."""
        from cacheloader.transport.control import stop_daemon

        with meter.phase("cold", page_cache="empty cache; the store's files in memory") as clock:
            loader: Any = self._loader.open(task, clock)
            clock.take(loader, self._loader.count)
        items: list[tuple[str, bytes]] = []
        half = task.expected.samples // task.batch_size // 2
        for _, batch in zip(range(half), loader, strict=False):
            items += self._loader.items(batch)
        saved, before = loader.state_dict(), len(items)
        del loader
        stop_daemon(Path(task.folder, "cache"))
        rest = (task.expected.samples - before, task.expected.size_bytes - sum(len(item) for _, item in items))
        cached = "cached files in memory; no daemon runs"
        with meter.phase("resumed", page_cache=cached, expected=rest) as clock:
            loader = self._loader.open(task, clock)
            loader.load_state_dict(saved)
            batches: list[Any] = []

            def count(batch: Any) -> tuple[int, int]:
                batches.append(batch)
                return self._loader.count(batch)

            clock.take(loader, count)
        items += [item for batch in batches for item in self._loader.items(batch)]
        meter.verify(items)
        return meter.measurement(self._loader.configuration | {"resumed": f"after {half} batches, daemon stopped"})


def daemon_pid(cache_dir: Path) -> int:
    """The private daemon's, as the kernel names who listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(str(cache_dir / "daemon.sock"))
        found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS))
    return int(struct.unpack(_CREDENTIALS, found)[0])
