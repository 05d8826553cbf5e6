"""One measurement: jobs that read at a given pace through a given cache, and what the simulator says of the same."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks.pressure.stage import BUCKET, UNTHROTTLED, staged
from tests.support.fault_proxy import heavy_tail

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.pressure.stage import Stage, Stocked

SHUFFLE_WINDOW = 2
HEAD_BYTES = 700
"""Of each answer: what a response has besides its body, as the link counts it."""

TYPICAL_S, SLOW_S = 0.1, (5.0, 10.0)
"""Waits for the store's answers, in cases with slow ones."""

BLOCK_BYTES, INDEX_BLOCKS, OWN_BYTES = 4096, 1, 2_750_000
"""What a shard and the cache itself take on disk, about: from it the cache's size is chosen, not what it is compared
with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured.

    Attributes:
        name: Of the row in the report.
        cached: Part of the data set that the cache holds.
        eviction: ``"plan"`` or ``"lru"``.
        num_jobs: Jobs with seeds of their own, batch by batch in step.
        epoch_s: Seconds that an epoch takes without waiting.
        bandwidth: Of the link, as a part of what one job takes without waiting; 0 for no throttle.
        num_epochs: Read; the first is not part of the averages, and the link is not throttled in it.
        slow_answers: Part of the store's answers that wait for ``SLOW_S``; the others wait around ``TYPICAL_S`` then.
        hedge_share: Part of the requests that may be asked a second time. Without it, what is read is the cache's
            decision alone.
    """

    name: str
    cached: float
    eviction: str = "plan"
    num_jobs: int = 1
    epoch_s: float = 6.0
    bandwidth: float = 0.0
    num_epochs: int = 4
    slow_answers: float = 0.0
    hedge_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out.

    Attributes:
        case: What was measured.
        dataset_bytes: All shards.
        cached_bytes: Shards that the cache could hold, from what they took on disk.
        window_bytes: Bound of what was fetched ahead.
        epoch_bytes: By epoch after the first: sent by the store while each job read the data set once.
        epoch_s: By epoch after the first: seconds.
        samples: Delivered to all jobs.
        memory_serves: Shards that had to be served past the cache.
        simulated_bytes: Of the same case by the simulator, on average.
        simulated_stall: Likewise.
    """

    case: Case
    dataset_bytes: int
    cached_bytes: float
    window_bytes: int
    epoch_bytes: list[float]
    epoch_s: list[float]
    samples: int
    memory_serves: int
    simulated_bytes: float
    simulated_stall: float

    @property
    def bytes_per_epoch(self) -> float:
        """Average."""
        return sum(self.epoch_bytes) / len(self.epoch_bytes)

    @property
    def least_bytes(self) -> float:
        """What no policy goes below, for one job."""
        return max(0.0, self.dataset_bytes - self.cached_bytes)

    @property
    def hit_rate(self) -> float:
        """Part of what the jobs read that was not fetched for them."""
        return 1 - self.bytes_per_epoch / (self.case.num_jobs * self.dataset_bytes)

    @property
    def stall(self) -> float:
        """Seconds of waiting for each second of computing, as in the bound."""
        return sum(self.epoch_s) / len(self.epoch_s) / self.case.epoch_s - 1

    @property
    def least_stall(self) -> float:
        """What no policy goes below, for one job: in ``(1 - c) / b`` seconds the link brings what a second needs."""
        if not self.case.bandwidth:
            return 0.0
        return max(0.0, self.least_bytes / self.dataset_bytes / self.case.bandwidth - 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the derived ones too."""
        derived = ("bytes_per_epoch", "least_bytes", "hit_rate", "stall", "least_stall")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def measure(folder: Path, stocked: Stocked, case: Case) -> Outcome:
    """Run one case below ``folder``, which is made, and simulate the same."""
    blocks = -(-stocked.shard_bytes // BLOCK_BYTES) + INDEX_BLOCKS
    cache_bytes = int(case.cached * stocked.shape.num_shards * blocks * BLOCK_BYTES) + OWN_BYTES
    wanted_bytes_per_s = stocked.dataset_bytes / case.epoch_s
    bytes_per_s = case.bandwidth * wanted_bytes_per_s or UNTHROTTLED
    latency_of = None
    if case.slow_answers:
        latency_of = heavy_tail(17, typical_s=TYPICAL_S, slow_s=SLOW_S, slow_share=case.slow_answers)
    with staged(
        folder,
        stocked,
        cache_bytes=cache_bytes,
        eviction=case.eviction,
        hedge_share=case.hedge_share,
        latency_of=latency_of,
    ) as stage:
        marks, samples, plan = _read(stage, stocked, case, bytes_per_s)
    # What the cache could really hold: shards take whole blocks and have an index, and the cache has one of its own.
    used_bytes = plan["resident_bytes"] / plan["resident_shards"]
    share = (plan["quota_bytes"] - plan["overhead_bytes"]) / (stocked.shape.num_shards * used_bytes)
    found = _simulated(stocked, case, cached=share, bytes_per_s=bytes_per_s)
    return Outcome(
        case=case,
        dataset_bytes=stocked.dataset_bytes,
        cached_bytes=min(1.0, share) * stocked.dataset_bytes,
        window_bytes=plan["lookahead_bytes"],
        epoch_bytes=[after[1] - before[1] for before, after in pairwise(marks[1:])],
        epoch_s=[after[0] - before[0] for before, after in pairwise(marks[1:])],
        samples=samples,
        memory_serves=plan["memory_serves"],
        simulated_bytes=found["origin_bytes_per_epoch"],
        simulated_stall=found["stall"],
    )


def _read(
    stage: Stage, stocked: Stocked, case: Case, bytes_per_s: float
) -> tuple[list[tuple[float, float]], int, dict[str, Any]]:
    """Read all epochs.

    Returns:
        Time and bytes sent, at the start and after each epoch; the samples delivered; the planner's statistics.
    """
    import cacheloader as cl

    shape = stocked.shape
    batch_size = shape.batch_size
    batch_s = case.epoch_s * batch_size / shape.num_samples
    samples = 0
    loaders = []
    for job in range(case.num_jobs):
        dataset = cl.RemoteDataset(
            f"s3://{BUCKET}/{shape.prefix}/train-{{00000..{shape.num_shards - 1:05d}}}.tar",
            seed=17 + job,
            shuffle_window=SHUFFLE_WINDOW,
            storage_options=stage.storage_options,
            daemon=stage.daemon_url,
        )
        loaders.append(cl.DataLoader(dataset, batch_size=batch_size, num_workers=0))
    marks = [(time.monotonic(), _sent(stage, stocked))]
    for _ in range(case.num_epochs):
        due_s = time.monotonic()
        for batches in zip(*loaders, strict=True):
            samples += sum(len(batch["__key__"]) for batch in batches)
            # The device computes for this long from when it has its batch; what came late is not caught up.
            due_s = max(due_s, time.monotonic()) + batch_s
            if (left_s := due_s - time.monotonic()) > 0:
                time.sleep(left_s)
        marks.append((time.monotonic(), _sent(stage, stocked)))
        # The first epoch only fills the cache, which need not take long.
        stage.link.bytes_per_s = bytes_per_s
    return marks, samples, stage.plan()


def _sent(stage: Stage, stocked: Stocked) -> float:
    # The link counts heads as well; a shard is one answer.
    return stage.link.sent_bytes * stocked.shard_bytes / (stocked.shard_bytes + HEAD_BYTES)


def _simulated(stocked: Stocked, case: Case, *, cached: float, bytes_per_s: float) -> dict[str, Any]:
    from cacheloader_daemon.simulator.forecast import forecast
    from cacheloader_daemon.simulator.settings import Settings
    from cacheloader_daemon.store import reserve_bytes

    shape = stocked.shape
    settings = Settings(
        num_shards=shape.num_shards,
        shard_bytes=stocked.shard_bytes,
        reserve_bytes=reserve_bytes(stocked.shard_bytes),
        samples_per_shard=shape.samples_per_shard,
        cache_bytes=int(cached * stocked.dataset_bytes),
        samples_per_s=shape.num_samples / case.epoch_s,
        bandwidth_bytes_per_s=min(bytes_per_s, 2e8),
        latency_s=TYPICAL_S if case.slow_answers else 0.003,
        late_share=case.slow_answers,
        late_s=sum(SLOW_S) / len(SLOW_S) if case.slow_answers else 0.0,
        hedge=bool(case.hedge_share),
        check_s=0.005,
        eviction=case.eviction,
        num_jobs=case.num_jobs,
        batch_size=shape.batch_size,
        shuffle_window=SHUFFLE_WINDOW,
        num_epochs=case.num_epochs,
    )
    return forecast(settings).to_dict()
