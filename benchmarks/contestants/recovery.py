"""A daemon's start on a cache of many blobs, whose index is there, deleted, corrupt, or not to be trusted."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import OPENED

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter

CACHE = "cache"
SHARDS = "shards"
CACHE_SIZE = "1TiB"
PAGE_CACHE = "names and inodes in memory, blobs not read"
_READY_S = 120.0


class Restart:
    """First the store alone, in this process; then a whole daemon, up to the first lease of a cached shard.

    Args:
        index: ``"there"``, ``"deleted"``, ``"corrupt"``, or ``"power failed"``, when it is there and not trusted.
    """

    def __init__(self, *, index: str) -> None:
        self._spoil = _SPOIL[index]

    def prepare(self, task: Task) -> None:
        """Import what both parts need."""
        for module in ("cacheloader.transport.open", "cacheloader_daemon.plan.machine", "cacheloader_daemon.storage"):
            import_module(module)
        self._cache = Path(task.source_folder) / CACHE
        self._shards = Path(task.source_folder) / SHARDS

    def run(self, task: Task, meter: Meter) -> Measurement:
        """Two phases; both end with all blobs known."""
        self._spoil(self._cache)
        with meter.phase("recovery", page_cache=PAGE_CACHE) as clock:
            residents, close = _recover(self._cache)
            clock.add(samples=len(residents), size_bytes=task.expected.size_bytes)
            clock.end_epoch()
        meter.verify((blob.key.hex(), str(blob.size_bytes).encode()) for blob in residents)
        num_residents = len(residents)
        close()
        del residents, close
        self._spoil(self._cache)
        log = Path(task.folder) / "daemon.log"
        with meter.phase("restart", page_cache=PAGE_CACHE) as clock:
            daemon = start_daemon(self._cache, log)
            try:
                clock.mark(OPENED)
                clock.first_batch_s, lease_s = self._first_lease(clock)
                clock.fetch_s.append(lease_s)
                clock.add(samples=num_residents, size_bytes=task.expected.size_bytes)
                clock.end_epoch()
            finally:
                os.kill(daemon.pid, signal.SIGTERM)
                daemon.wait(timeout=30)
        return meter.measurement({"blobs": task.expected.samples})

    def _first_lease(self, clock: Any) -> tuple[float, float]:
        """Seconds since the phase began, and those that the lease alone took."""
        from cacheloader.config import TransportOptions
        from cacheloader.protocol.messages import DatasetSpec
        from cacheloader.transport.open import open_transport

        transport = open_transport(TransportOptions(daemon=f"unix://{self._cache}/daemon.sock"))
        try:
            transport.open_dataset(DatasetSpec(urls=[str(self._shards)], format=""), digest="", progress=None)
            asked_s = time.perf_counter()
            lease = transport.acquire(0)
            lease_s, since_s = time.perf_counter() - asked_s, clock.elapsed_s
            if lease.source != "nvme":
                raise RuntimeError(f"the first lease came from {lease.source} and not from the cache")
            found = lease.read(0, lease.size_bytes)
            if found != min(self._shards.glob("*.tar")).read_bytes():
                raise RuntimeError("the first lease holds other bytes than the shard")
            lease.release()
        finally:
            transport.close()
        return since_s, lease_s


def _recover(cache: Path) -> tuple[list[Any], Callable[[], None]]:
    """What a daemon does with its cache before clients can connect."""
    from cacheloader_daemon.config import DaemonConfig
    from cacheloader_daemon.garbage import no_collection
    from cacheloader_daemon.plan.machine import Planner
    from cacheloader_daemon.plan.options import PlannerOptions
    from cacheloader_daemon.storage import open_pool

    opening = open_pool(DaemonConfig(cache_dir=cache, cache_size=CACHE_SIZE))
    pool = opening.__enter__()
    survey = pool.survey()
    residents = pool.resident()
    with no_collection():
        Planner(
            PlannerOptions(quota_bytes=pool.quota_bytes),
            resident=[(blob.key, blob.used_bytes) for blob in residents],
            overhead_bytes=survey.overhead_bytes,
        )
    return residents, lambda: opening.__exit__(None, None, None)


def start_daemon(cache: Path, log: Path) -> subprocess.Popen[bytes]:
    """A daemon that clients can connect to."""
    news, ready = os.pipe()
    command = [
        sys.executable, "-m", "cacheloader_daemon", "--private", "--cache-dir", str(cache), "--cache-size", CACHE_SIZE,
        "--ready-fd", str(ready),
    ]  # fmt: skip
    with log.open("wb") as output:
        daemon = subprocess.Popen(command, stdout=output, stderr=output, pass_fds=[ready], start_new_session=True)
    os.close(ready)
    with os.fdopen(news, "rb") as file:
        line = file.readline() if select.select([file], [], [], _READY_S)[0] else b""
    if not line or not json.loads(line).get("ready"):
        daemon.kill()
        daemon.wait()
        raise RuntimeError(f"the daemon did not start: {line!r}\n{log.read_text()[-2000:]}")
    return daemon


def _delete(cache: Path) -> None:
    shutil.rmtree(cache / "lmdb")


def _corrupt(cache: Path) -> None:
    (cache / "lmdb" / "data.mdb").write_bytes(b"no index" * 65_536)


def _fail_power(cache: Path) -> None:
    """As if the machine had stopped while a daemon ran, after everything had reached the disk."""
    import msgspec
    from cacheloader_daemon.store.lifeline import Lifeline, Phase

    dir_fd = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lifeline = Lifeline(dir_fd)
        last = lifeline.read()
        if last is None:
            raise RuntimeError("the cache has no record of its last daemon")
        lifeline.write(msgspec.structs.replace(last, phase=Phase.RUNNING, boot_id="an earlier boot"))
    finally:
        os.close(dir_fd)


_SPOIL: dict[str, Callable[[Path], None]] = {
    "there": lambda _: None,
    "deleted": _delete,
    "corrupt": _corrupt,
    "power failed": _fail_power,
}
