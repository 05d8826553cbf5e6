"""A job that is slowed, killed, stopped and throttled at random, and whose report says so, second by second.

By default two ranks, a slow stretch of one, one SIGKILL and a throttled store. CACHELOADER_TEST_GOODPUT=long runs four
ranks with a second SIGKILL and a SIGSTOP (about five minutes). Who is struck and when follows from a seed that is
printed; CACHELOADER_TEST_SEED repeats it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from cacheloader.goodput.command import Reader
from cacheloader.transport.control import stop_daemon
from tests.support.goodput_witness import Throttle, Witness, held_up_s, injected, told
from tests.support.node_daemon import REPOSITORY, NodeDaemon
from tests.support.parent_death import die_with_parent
from tests.support.seaweedfs import storage_options
from tests.support.shard_sets import write_shards

if TYPE_CHECKING:
    from tests.support.counting_proxy import CountingProxy

IS_LONG = os.environ.get("CACHELOADER_TEST_GOODPUT") == "long"
SEED = int(os.environ.get("CACHELOADER_TEST_SEED", random.SystemRandom().randrange(10**6)))
WORLD = 4 if IS_LONG else 2
STEPS = 60 if IS_LONG else 40
SAVE_EVERY = 10
COMPUTE_S = 0.15
SAMPLE_BYTES = 16_000
NUM_SHARDS = 16
SHARD_SAMPLES = 8 * WORLD
TRAINER = Path(__file__).parents[1] / "support" / "goodput_trainer.py"
TIMEOUT_S = 900 if IS_LONG else 300


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A signal that a rank gets in an attempt, ``delay_s`` after it asked for the batch of ``step``."""

    attempt: int
    rank: int
    step: int
    delay_s: float
    kind: str


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank that computes longer, from step ``first`` on."""

    rank: int
    first: int
    steps: int
    slow_s: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What shall go wrong."""

    strikes: tuple[Strike, ...]
    slow: Slow
    throttle: dict[str, Any]

    @classmethod
    def drawn(cls, rng: random.Random) -> Self:
        kinds = ["SIGKILL", "SIGSTOP", "SIGKILL"] if IS_LONG else ["SIGKILL"]
        rng.shuffle(kinds)
        steps = _steps(rng, len(kinds))
        strikes = [
            Strike(
                attempt=attempt,
                rank=rng.randrange(WORLD),
                step=steps[attempt],
                # Anywhere in the step or behind it, in fetch, computing, collective or save. What a process that stops
                # did last nobody sees, so that the account takes a usual step for it.
                delay_s=rng.uniform(0, COMPUTE_S if kind == "SIGSTOP" else 3 * COMPUTE_S),
                kind=kind,
            )
            for attempt, kind in enumerate(kinds)
        ]
        slow = Slow(
            rank=rng.randrange(WORLD), first=rng.randint(3, STEPS - 14), steps=rng.randint(8, 12),
            slow_s=rng.uniform(0.2, 0.4),
        )  # fmt: skip
        throttle = {
            "first_step": rng.randint(2, 14), "bytes_per_s": rng.uniform(80_000, 160_000) * WORLD,
            "wait_s": rng.uniform(1.5, 4.0) * WORLD,
        }  # fmt: skip
        return cls(strikes=tuple(strikes), slow=slow, throttle=throttle)


def _steps(rng: random.Random, count: int) -> list[int]:
    """Of each attempt's strike: some steps behind the checkpoint from which the attempt goes on."""
    while True:
        steps = sorted(rng.sample(range(6, STEPS - 4), count))
        goes_on_behind = [0, *((step + 2) // SAVE_EVERY * SAVE_EVERY for step in steps)]
        if all(step >= behind + 4 for step, behind in zip(steps, goes_on_behind, strict=False)):
            return steps


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_every_injected_second_lies_where_it_belongs(tmp_path: Path, s3: Any, bucket: str, prefix: str, s3_proxy: CountingProxy) -> None:  # noqa: E501  # fmt: skip
    plan = Plan.drawn(random.Random(SEED))
    print(f"CACHELOADER_TEST_SEED={SEED}: {plan}")
    shards = write_shards(
        tmp_path / "shards", num_shards=NUM_SHARDS, samples_per_shard=SHARD_SAMPLES, sample_bytes=SAMPLE_BYTES
    )
    url = shards.upload(s3, bucket, prefix + "data")
    counts = {path.name: SHARD_SAMPLES for path in shards.paths}  # or the one scan that counts would warm the cache
    s3.put_object(Bucket=bucket, Key=f"{prefix}data/shards.json", Body=json.dumps(counts).encode())
    throttle = Throttle(s3_proxy, tmp_path, **plan.throttle)
    # A cache for a part of the data: little of it is read ahead, so that a throttle is felt whenever it comes.
    cache_bytes = 3 * 2**20 + 8 * SHARD_SAMPLES * SAMPLE_BYTES
    config = {
        "folder": str(tmp_path), "run": str(tmp_path / "run"), "urls": url, "cache_dir": str(tmp_path / "cache"),
        "storage_options": storage_options(s3_proxy.url), "cache_size": str(cache_bytes),
        "compute_s": COMPUTE_S, "save_every": SAVE_EVERY,
        "save_s": 0.2, "steps": STEPS, "strikes": [asdict(strike) for strike in plan.strikes],
        "slow": asdict(plan.slow), "timeout_s": 15 if IS_LONG else 60,
        "throttle_at": plan.throttle["first_step"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    daemon = NodeDaemon(tmp_path / "cache", cache_size=str(cache_bytes)).start()
    witness = Witness(tmp_path)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", "--max-restarts=4"]
    command += ["--monitor-interval=0.2", "--shutdown-timeout=5", str(TRAINER), str(tmp_path / "config.json")]
    with (tmp_path / "output.txt").open("wb") as output:
        job = subprocess.Popen(
            die_with_parent([sys.executable, *command]), stdout=output, stderr=output,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while job.poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "output.txt").read_text()[-3000:]
            witness.look()
            throttle.look()
            time.sleep(0.02)
        witness.look()
        throttle.look(at_once=True)
        assert job.returncode == 0, (tmp_path / "output.txt").read_text()[-3000:]
    finally:
        job.kill()
        job.wait(60)
        for pid in witness.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.stop()
        stop_daemon(tmp_path / "cache", timeout_s=60)
    if os.environ.get("CACHELOADER_TEST_KEEP"):
        print(tmp_path)
    lines_of = told(tmp_path)
    struck = sorted((a, line["what"], rank) for (a, rank), own in lines_of.items() for line in own if line["what"].startswith("SIG"))  # noqa: E501  # fmt: skip
    assert struck == [(one.attempt, one.kind, one.rank) for one in plan.strikes], "not what was planned went wrong"
    assert len({attempt for attempt, _ in lines_of}) == len(plan.strikes) + 1, (tmp_path / "output.txt").read_text()[-3000:]  # noqa: E501  # fmt: skip
    assert throttle.is_over
    reader = Reader(tmp_path / "run")
    account, _ = reader.account()
    assert reader.folder.damaged == []
    assert sum(account.totals.values()) == account.paid_ns
    truth = {category: seconds / WORLD for category, seconds in injected(lines_of, witness.gone).items()}
    measured = {category: ns / 1e9 / WORLD for category, ns in account.totals.items()}
    rows = {category.label: (round(truth[category], 3), round(measured[category], 3)) for category in truth}
    print(f"seconds a device, (truth, report): {rows}; failures: {[(f.rank, f.cause) for f in account.failures]}")
    print(f"held up: ranks {held_up_s(lines_of):.2f} s, witness {witness.late_s:.2f} s")
    # Where the machine held up who measured, truth and report cannot be closer to each other than that.
    held_s = held_up_s(lines_of) / WORLD + witness.late_s
    for category, true_s in truth.items():
        assert abs(measured[category] - true_s) <= max(0.5, 0.02 * true_s) + held_s, (category.label, rows, held_s)
    assert [failure.rank for failure in account.failures] == [strike.rank for strike in plan.strikes]
    by_computing = {rank: ns - account.arrivals.fetch_ns[rank] for rank, ns in account.arrivals.caused_ns.items()}
    assert max(by_computing, key=lambda rank: by_computing[rank]) == plan.slow.rank, (by_computing, plan.slow)
