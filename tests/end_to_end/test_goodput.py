"""A job that is slowed, killed, stopped and throttled, and whose report says so, second by second.

By default two ranks, one slow rank, one SIGKILL and a throttled store. CACHELOADER_TEST_GOODPUT=long runs four ranks,
with a second SIGKILL and a SIGSTOP (about two minutes).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cacheloader.goodput.categories import Category
from cacheloader.goodput.command import Reader
from cacheloader.transport.control import stop_daemon
from tests.support.node_daemon import REPOSITORY, NodeDaemon, is_running
from tests.support.parent_death import die_with_parent
from tests.support.seaweedfs import storage_options
from tests.support.shard_sets import write_shards

if TYPE_CHECKING:
    from tests.support.counting_proxy import CountingProxy

IS_LONG = os.environ.get("CACHELOADER_TEST_GOODPUT") == "long"
WORLD = 4 if IS_LONG else 2
TRAINER = Path(__file__).parents[1] / "support" / "goodput_trainer.py"
TIMEOUT_S = 600 if IS_LONG else 240


@dataclass
class Witness:
    """Sees from outside when each process is gone."""

    folder: Path
    gone: dict[tuple[int, int], float] = field(default_factory=dict)
    pids: dict[tuple[int, int], int] = field(default_factory=dict)

    def look(self) -> None:
        for path in self.folder.glob("pid-*"):
            _, attempt, rank = path.name.split("-")
            with contextlib.suppress(ValueError):
                self.pids.setdefault((int(attempt), int(rank)), int(path.read_text()))
        for key, pid in self.pids.items():
            if key not in self.gone and not is_running(pid):
                self.gone[key] = time.time()


def fault(attempt: int, rank: int, step: int, **what: Any) -> dict[str, Any]:
    return {"attempt": attempt, "rank": rank, "step": step, **what}


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_every_injected_second_lies_where_it_belongs(tmp_path: Path, s3: Any, bucket: str, prefix: str, s3_proxy: CountingProxy) -> None:  # noqa: E501  # fmt: skip
    shards = write_shards(tmp_path / "shards", num_shards=16, samples_per_shard=8 * WORLD, sample_bytes=4000)
    url = shards.upload(s3, bucket, prefix + "data")
    counts = {path.name: 8 * WORLD for path in shards.paths}  # or the one scan that counts would warm the cache
    s3.put_object(Bucket=bucket, Key=f"{prefix}data/shards.json", Body=json.dumps(counts).encode())
    faults = [fault(0, 1, step, slow_s=0.3) for step in range(11, 21)]
    faults.append(fault(0, 1, 27, kind="SIGKILL"))
    if IS_LONG:
        faults += [fault(1, 3, 34, kind="SIGSTOP"), fault(2, 0, 45, kind="SIGKILL")]
    s3_proxy.bandwidth_bytes_per_s = 100_000.0 * WORLD  # a batch takes longer to arrive than to compute
    config = {
        "folder": str(tmp_path), "run": str(tmp_path / "run"), "urls": url, "cache_dir": str(tmp_path / "cache"),
        "storage_options": storage_options(s3_proxy.url), "compute_s": 0.15, "save_every": 10, "save_s": 0.2,
        "steps": 60 if IS_LONG else 40, "faults": faults, "timeout_s": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    daemon = NodeDaemon(tmp_path / "cache").start()
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
            time.sleep(0.02)
        witness.look()
        assert job.returncode == 0, (tmp_path / "output.txt").read_text()[-3000:]
    finally:
        job.kill()
        job.wait(10)
        for pid in witness.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.stop()
        stop_daemon(tmp_path / "cache")
    reader = Reader(tmp_path / "run")
    account, _ = reader.account()
    assert reader.folder.damaged == []
    assert sum(account.totals.values()) == account.paid_ns
    truth = injected(tmp_path, witness)
    measured = {category: ns / 1e9 / WORLD for category, ns in account.totals.items()}
    rows = {category.label: (round(truth[category], 3), round(measured[category], 3)) for category in truth}
    print(f"seconds a device, (truth, report): {rows}; failures: {[(f.rank, f.cause) for f in account.failures]}")
    if os.environ.get("CACHELOADER_TEST_KEEP"):
        print(tmp_path)
    for category, true_s in truth.items():
        assert abs(measured[category] - true_s) <= max(0.5, 0.02 * true_s), (category.label, rows)
    stopped = [f for f in account.failures if f.rank == 3] if IS_LONG else []
    assert [f.rank for f in account.failures if f not in stopped] == ([1, 0] if IS_LONG else [1])
    assert len(stopped) == (1 if IS_LONG else 0)
    assert account.arrivals.last.most_common(1)[0][0] == 1


def injected(folder: Path, witness: Witness) -> dict[Category, float]:
    """Seconds a device by what the ranks and the witness saw, without looking at any event."""
    told: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for path in folder.glob("truth-*.jsonl"):
        _, attempt, rank = path.stem.split("-")
        told[int(attempt), int(rank)] = [json.loads(line) for line in path.read_text().splitlines()]
    attempts = sorted({attempt for attempt, _ in told})
    total: dict[Category, float] = defaultdict(float)
    for attempt in attempts:
        mine = {rank: lines for (a, rank), lines in told.items() if a == attempt}
        later = [lines[0]["step"] for (a, _), lines in told.items() if a == attempt + 1]
        kept_until = later[0] if later else 10**9
        death = min((e["end"] for lines in mine.values() for e in lines if e["what"].startswith("SIG")), default=None)
        last_exit = max(witness.gone[attempt, rank] for rank in mine)
        errors = [e["end"] for lines in mine.values() for e in lines if e["what"] == "error"]
        errors += [witness.gone[attempt, r] for r, lines in mine.items() if not any(e["what"].startswith("SIG") for e in lines)]  # noqa: E501  # fmt: skip
        arrivals: dict[int, list[float]] = defaultdict(list)
        for lines in mine.values():
            for e in lines:
                if e["what"] == "collective":
                    arrivals[e["step"]].append(e["begin"])
        for lines in mine.values():
            last_end = 0.0
            for e in lines:
                if e["what"] == "step":
                    last_end = e["end"]
                    saves = sum(s["end"] - s["begin"] for s in lines if s["what"] == "save" and s["step"] == e["step"])
                    if e["step"] > kept_until:
                        total[Category.LOST] += e["end"] - e["begin"] - saves
                elif e["what"] == "fetch" and e["step"] <= kept_until:
                    total[Category.FETCH] += e["end"] - e["begin"]
                elif e["what"] == "collective" and e["step"] <= kept_until and len(arrivals[e["step"]]) == len(mine):
                    total[Category.STRAGGLER] += max(arrivals[e["step"]]) - e["begin"]
                elif e["what"] == "save":
                    total[Category.CKPT] += e["end"] - e["begin"]
            if death is not None:
                reaction = max(death, min(errors))
                total[Category.LOST] += max(0.0, death - last_end)
                total[Category.DETECT] += reaction - max(death, last_end)
                total[Category.SPIN] += last_exit - reaction
        for rank in range(len(mine)):
            following = told.get((attempt + 1, rank))
            if following:
                first = next(e for e in following if e["what"] == "fetch")
                total[Category.RESTART] += first["begin"] - last_exit
    return {category: seconds / WORLD for category, seconds in total.items()}
