"""The chaos run: a real job over a real store, broken again and again at random, and then audited."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheloader.errors import CacheloaderError
from cacheloader.transport.control import stop_daemon
from tests.chaos.job import Job
from tests.chaos.ledger import Verdict, fold
from tests.chaos.processes import Process, marked, send
from tests.support.cache_meter import disk_bytes
from tests.support.counting_proxy import Fault
from tests.support.fault_proxy import FaultProxy
from tests.support.seaweedfs import SeaweedServer, storage_options
from tests.support.shard_sets import write_shards

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_SHARDS = 24
SAMPLES_PER_SHARD = 32
SAMPLE_BYTES = 9000
GLOBAL_BATCH = 24
STEPS_PER_EPOCH = NUM_SHARDS * SAMPLES_PER_SHARD // GLOBAL_BATCH
LANES = 2
CACHE_BYTES = 3 * 2**20 + 4_500_000
"""The index and about 60 % of the shards, so that every epoch fetches again."""

HANG_S = 150.0
"""A job that takes no step for so long, on a machine that may be busy, hangs. Above the silence after which a session
gives its daemon up, and the time to start everything anew."""

BACKGROUND_FAULTS = 0.03
DISK_LOOK_S = 0.05

KILLS_OF_THE_ATTEMPT = {"kill a worker", "kill a rank", "end a rank", "kill the launcher"}
# What ends an attempt takes the longest, so that others are drawn more often.
WEIGHTS = {
    "kill the daemon": 14,
    "end the daemon": 6,
    "stop the daemon for a moment": 8,
    "stop the daemon for long": 2,
    "kill an index worker": 6,
    "kill a worker": 5,
    "stop a worker for a moment": 7,
    "kill a rank": 4,
    "end a rank": 2,
    "stop a rank for a moment": 6,
    "kill the launcher": 3,
    "the store is down": 8,
    "the store fails half of all requests": 9,
    "the store stalls a body": 3,
    "the store slows down": 5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run has shown.

    Attributes:
        events: How often each thing happened.
        faults: Requests that met a fault of the store.
        attempts: Times that the job was started.
        unexpected: Ends of attempts that no event explains, with the end of what was printed.
        hangs: Times that the job took no step for ``HANG_S``.
        verdict: What was delivered.
        peak_bytes: Largest size of the cache directory that was seen.
        looks: How often it was looked at.
        left_behind: Processes, sockets, partial files and locks that outlived the job.
        seconds: How long it took.
    """

    events: Counter[str]
    faults: int
    attempts: int
    unexpected: list[str]
    hangs: int
    verdict: Verdict
    peak_bytes: int
    looks: int
    left_behind: list[str]
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        verdict = self.verdict
        return not (
            self.unexpected
            or self.hangs
            or verdict.wrong
            or verdict.missing
            or verdict.repeated
            or self.left_behind
            or self.peak_bytes > CACHE_BYTES
        )

    def lines(self) -> list[str]:
        """For people."""
        verdict = self.verdict
        return [
            *(f"  {count:4d} x {name}" for name, count in sorted(self.events.items())),
            f"{self.events.total()} events, {self.faults} requests broken by the store, {self.attempts} attempts, "
            f"{self.seconds:.0f} s",
            f"{verdict.delivered} samples delivered, {verdict.kept} kept, {verdict.epochs} whole epochs: "
            f"{verdict.wrong} wrong, {verdict.missing} missing, {verdict.repeated} repeated",
            f"{self.hangs} hangs, {len(self.unexpected)} ends without a cause",
            f"cache: at most {self.peak_bytes} of {CACHE_BYTES} bytes in {self.looks} looks",
            f"left behind: {', '.join(self.left_behind) or 'nothing'}",
            *self.unexpected,
        ]


class ChaosRun:
    """One run.

    Args:
        folder: For everything; short, since a socket lies in it.
        num_events: How often something is broken.
        seed: Decides what, where and when, as far as that is in our hands.
        say: Told of each event.
    """

    def __init__(self, folder: Path, *, num_events: int, seed: int, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._num_events = num_events
        self._rng = random.Random(seed)
        self._seed = seed
        self._say = say
        self._mark = uuid.uuid4().hex
        self._events: Counter[str] = Counter()
        self._unexpected: list[str] = []
        self._hangs = 0
        self._peak_bytes = self._looks = 0
        self._finished = threading.Event()
        self._is_enough = threading.Event()
        self._cache = folder / "cache"

    def end_early(self) -> None:
        """Break nothing more; the job ends as it would have, and is audited."""
        self._is_enough.set()

    def run(self) -> Summary:
        """Break the job, let it end, and look at what is left."""
        started_s = time.monotonic()
        shards = write_shards(
            self._folder / "shards",
            num_shards=NUM_SHARDS,
            samples_per_shard=SAMPLES_PER_SHARD,
            sample_bytes=SAMPLE_BYTES,
            seed=self._seed,
        )
        server = SeaweedServer(self._folder / "store")
        server.start()
        self._proxy = proxy = FaultProxy(server.port)
        proxy.start()
        meter = threading.Thread(target=self._watch_disk)
        try:
            client = server.client()
            client.create_bucket(Bucket="chaos")
            url = shards.upload(client, "chaos", "data")
            counts = {path.name: SAMPLES_PER_SHARD for path in shards.paths}
            client.put_object(Bucket="chaos", Key="data/sizes.json", Body=json.dumps(counts).encode())
            self._job = Job(folder=self._folder, mark=self._mark, config=self._config(url))
            self._calm()
            meter.start()
            self._break_and_restart()
            left_behind = self._left_behind()
        finally:
            self._finished.set()
            for process in marked(self._mark):
                send(process, signal.SIGKILL)
            if meter.ident is not None:
                meter.join(60)
            proxy.stop()
            server.stop()
        return Summary(
            events=self._events,
            faults=proxy.num_drawn,
            attempts=self._job.attempt + 1,
            unexpected=self._unexpected,
            hangs=self._hangs,
            verdict=fold(self._folder, shards.digests),
            peak_bytes=self._peak_bytes,
            looks=self._looks,
            left_behind=left_behind,
            seconds=time.monotonic() - started_s,
        )

    def _config(self, url: str) -> dict[str, object]:
        return {
            "folder": str(self._folder),
            "url": url,
            "storage_options": storage_options(self._proxy.url),
            "cache_dir": str(self._cache),
            "cache_size": CACHE_BYTES,
            "global_batch": GLOBAL_BATCH,
            "lanes": LANES,
            "save_every": 3,
            "step_s": 0.01,
            "seed": self._seed,
        }

    def _break_and_restart(self) -> None:
        self._launch()
        for number in range(self._num_events):
            if not self._progress(self._rng.randint(0, 6)):
                return
            if self._is_enough.is_set():
                break
            names, weights = zip(*WEIGHTS.items(), strict=True)
            event = self._rng.choices(names, weights)[0]
            what = self._do(event)
            self._events[event] += 1
            self._say(f"{number + 1:4d}. {event}{what}")
            if event in KILLS_OF_THE_ATTEMPT and what != ": nobody there":
                self._after_a_kill()
        self._proxy.draw_faults(0, 0.0)
        self._job.wish_to_stop()
        while self._running(HANG_S * 2):
            if self._job.ended == 0:
                return
            self._note_unexpected_end()
            if len(self._unexpected) > 5:
                return
            self._launch()

    def _launch(self) -> None:
        self._job.launch(world=self._rng.choice([1, 2, 2, 3]), num_workers=self._rng.choice([0, 1, 2]))
        self._say(f"      attempt {self._job.attempt}")

    def _progress(self, num_steps: int) -> bool:
        """Wait until the attempt has made so many steps more; a new one is started where it ends without a cause."""
        target = self._job.num_steps + num_steps
        deadline = time.monotonic() + HANG_S
        while self._job.num_steps < max(target, 1):
            if self._job.ended is not None:
                self._note_unexpected_end()
                if len(self._unexpected) > 5:
                    return False
                self._launch()
                target, deadline = num_steps, time.monotonic() + HANG_S
            if time.monotonic() > deadline:
                self._hangs += 1
                self._unexpected.append(f"no step in {HANG_S:g} s:\n{self._printed()}\n{self._stacks()}")
                return False
            time.sleep(0.02)
        return True

    def _running(self, timeout_s: float) -> bool:
        """Wait for the attempt's end; ``False`` if it does not come."""
        assert self._job.launcher is not None
        try:
            self._job.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._hangs += 1
            self._unexpected.append(f"no end in {timeout_s:g} s:\n{self._printed()}\n{self._stacks()}")
            return False
        return True

    def _after_a_kill(self) -> None:
        """What was hit brings its attempt down, within the deadline that its parts have for each other.

        A worker that had nothing more to read is not missed: then the job goes on, epoch after epoch.
        """
        enough = self._job.num_steps + 2 * STEPS_PER_EPOCH
        deadline = time.monotonic() + HANG_S
        while self._job.ended is None and time.monotonic() < deadline:
            if self._job.num_steps > enough:
                return
            time.sleep(0.02)
        if self._running(1.0):
            deadline = time.monotonic() + 60
            while any(p.role in {"launcher", "rank", "worker"} for p in self._processes()):
                if time.monotonic() > deadline:
                    self._unexpected.append(f"outlived their launcher: {self._processes()}")
                    break
                time.sleep(0.02)
            self._launch()

    def _note_unexpected_end(self) -> None:
        self._unexpected.append(f"attempt {self._job.attempt} ended with {self._job.ended}:\n{self._printed()}")

    def _printed(self) -> str:
        return self._job.output_path.read_text(errors="replace")[-3000:]

    def _stacks(self) -> str:
        return "\n".join(f"{p.role} {p.pid} of {p.parent}" for p in self._processes())

    def _processes(self) -> list[Process]:
        return marked(self._mark)

    def _do(self, event: str) -> str:
        verb, _, name = event.split(" ", 2)
        if verb in {"kill", "end", "stop"}:
            return self._hit(verb, name)
        moment_s = self._rng.uniform(0.2, 2.5)
        match event.removeprefix("the store "):
            case "is down":
                with self._proxy.outage():
                    time.sleep(moment_s)
                return f" for {moment_s:.1f} s"
            case "fails half of all requests":
                self._proxy.draw_faults(self._rng.randrange(2**32), 0.5)
                time.sleep(moment_s)
                self._calm()
                return f" for {moment_s:.1f} s"
            case "stalls a body":
                self._proxy.inject(
                    Fault(action="stall", times=1, path=".tar", after_bytes=self._rng.randrange(100_000))
                )
            case "slows down":
                self._proxy.latency_s = self._rng.uniform(0.1, 0.4)
                time.sleep(moment_s)
                self._proxy.latency_s = 0.0
                return f" for {moment_s:.1f} s"
            case _:
                raise AssertionError(event)
        return ""

    def _hit(self, verb: str, name: str) -> str:
        target = name.partition(" for ")[0]
        role = "indexer" if target == "index worker" else target
        found = sorted((p for p in self._processes() if p.role == role), key=lambda p: p.pid)
        if not found:
            return ": nobody there"
        victim = self._rng.choice(found)
        match verb:
            case "kill":
                send(victim, signal.SIGKILL)
            case "end":
                send(victim, signal.SIGTERM)
            case _:
                pause_s = 13.0 if name.endswith("for long") else self._rng.uniform(0.1, 1.5)
                send(victim, signal.SIGSTOP)
                time.sleep(pause_s)
                send(victim, signal.SIGCONT)
                return f" ({pause_s:.1f} s, pid {victim.pid})"
        return f" (pid {victim.pid})"

    def _calm(self) -> None:
        self._proxy.draw_faults(self._rng.randrange(2**32), BACKGROUND_FAULTS)

    def _watch_disk(self) -> None:
        while not self._finished.wait(DISK_LOOK_S):
            self._peak_bytes = max(self._peak_bytes, disk_bytes(self._cache) if self._cache.exists() else 0)
            self._looks += 1

    def _left_behind(self) -> list[str]:
        try:
            stop_daemon(self._cache, timeout_s=60)
        except CacheloaderError as error:
            return [error.message]
        deadline = time.monotonic() + 100  # a helper waits a minute for the one that had it started, and may be killed
        while self._processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        left = [f"{process.role} {process.pid}" for process in self._processes()]
        left += [str(path) for path in self._cache.rglob("*.sock")]
        left += [str(path) for path in self._cache.rglob(".*.new")]
        left += [f"a lock on {path}" for path in self._cache.glob("*.lock") if _is_locked(path)]
        return left


def _is_locked(path: Path) -> bool:
    import fcntl

    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
