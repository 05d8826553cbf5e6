"""A job of several ranks is killed with SIGKILL at random moments and resumed with another number of ranks each time.

CACHELOADER_TEST_KILLS=20 runs the long form, every attempt under torchrun. CACHELOADER_TEST_SEED repeats a run.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cacheloader.audit.folder import audit_folder
from cacheloader.audit.report import lines
from cacheloader.cli import main
from cacheloader.transport.control import stop_daemon
from tests.support.helper_processes import command
from tests.support.node_daemon import REPOSITORY, is_running
from tests.support.parent_death import die_with_parent
from tests.support.seaweedfs import free_ports
from tests.support.shard_sets import write_shards
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_KILLS = int(os.environ.get("CACHELOADER_TEST_KILLS", "5"))
SEED = int(os.environ.get("CACHELOADER_TEST_SEED", random.SystemRandom().randrange(10**6)))
IS_LONG = NUM_KILLS > 10
WORLDS = (4, 2, 3, 6)
GLOBAL_BATCH = 24
TRAINER = Path(__file__).parents[1] / "support" / "killed_trainer.py"


@dataclass
class Job:
    """The job's folder and its attempt that runs."""

    folder: Path
    config: dict[str, Any]
    keys: list[str]
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def launch(self, attempt: int, *, world: int, under_torchrun: bool, num_workers: int) -> None:
        path = self.folder / f"config-{attempt}.json"
        path.write_text(json.dumps(self.config | {"attempt": attempt, "num_workers": num_workers}))
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon", "OMP_NUM_THREADS": "1"}
        if under_torchrun:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
            self._start([*torchrun, str(TRAINER), str(path)], environment, attempt)
            return
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(next(iter(free_ports()))),
            "WORLD_SIZE": str(world),
        }
        for rank in range(world):
            self._start([str(TRAINER), str(path)], environment | {"RANK": str(rank)}, attempt)

    def _start(self, command: list[str], environment: dict[str, str], attempt: int) -> None:
        with (self.folder / f"output-{attempt}.txt").open("ab") as output:
            self.launchers.append(
                subprocess.Popen(
                    die_with_parent([sys.executable, *command]), stdout=output, stderr=output, env=environment
                )
            )

    def pids(self, attempt: int) -> dict[int, int]:
        """Of each rank that has come up and said which process it is: to kill 0 would end this group of processes."""
        said = {int(path.name.rpartition("-")[2]): path.read_text() for path in self.folder.glob(f"pid-{attempt}-*")}
        return {rank: int(text) for rank, text in said.items() if text}

    def num_steps(self, attempt: int) -> int:
        """Batches that rank 0 of an attempt got."""
        path = self.folder / f"got-{attempt:03d}-0.jsonl"
        return path.read_bytes().count(b'"until"') if path.exists() else 0

    def wait(self, *, timeout_s: float) -> list[int]:
        """Exit codes of all that was started, once it has ended."""
        deadline = time.monotonic() + timeout_s
        codes = [launcher.wait(max(0.1, deadline - time.monotonic())) for launcher in self.launchers]
        self.launchers.clear()
        return codes

    def kill_all(self, attempt: int) -> None:
        for launcher in self.launchers:
            launcher.kill()
        for pid in self.pids(attempt).values():
            kill(pid)
        self.wait(timeout_s=60)
        wait_until(lambda: not any(is_running(pid) for pid in self.pids(attempt).values()))

    def output(self, attempt: int) -> str:
        return (self.folder / f"output-{attempt}.txt").read_text()[-3000:]


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    shard_set = write_shards(tmp_path / "shards", num_shards=12, samples_per_shard=51, sample_bytes=300)
    config = {
        "folder": str(tmp_path),
        "urls": str(shard_set.folder),
        "cache_dir": str(tmp_path / "cache"),
        "global_batch": GLOBAL_BATCH,
        "save_every": 3,
        "epochs": 7 if IS_LONG else 3,
        "seed": SEED,
        "tail": random.Random(SEED).choice(["drop", "pad", "keep"]),
    }
    job = Job(folder=tmp_path, config=config, keys=list(shard_set.digests))
    yield job
    for attempt in range(NUM_KILLS + 1):
        job.kill_all(attempt)
    stop_daemon(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.timeout(3000 if IS_LONG else 1500)
def test_a_job_killed_at_random_and_resumed_on_other_ranks_delivers_each_sample_once(job: Job, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}, {NUM_KILLS} kills, tail={job.config['tail']}")
    for attempt in range(NUM_KILLS):
        world = WORLDS[attempt % len(WORLDS)]
        job.launch(attempt, world=world, under_torchrun=IS_LONG or attempt == 0, num_workers=rng.choice([0, 1]))
        num_steps = rng.randint(0, 11)
        reach(job, attempt, num_steps, world=world)
        victim = rng.choice(["a rank", "a rank", "a rank", "the daemon and a rank", "all"])
        if victim == "the daemon and a rank":
            # Before its second batch there may be no daemon yet, and not every rank has opened the data set.
            reach(job, attempt, max(num_steps, 2), world=world)
            kill(daemon_of(tmp_path / "cache"))
            reach(job, attempt, max(num_steps, 2) + 2, world=world)
        if victim != "all":
            kill(job.pids(attempt)[rng.randrange(world)])
            time.sleep(rng.random() * 0.3)  # the others go on for a moment, until they miss the dead one
        job.kill_all(attempt)
        print(f"attempt {attempt}: {world} ranks, killed {victim} after {job.num_steps(attempt)} steps")
    world = WORLDS[NUM_KILLS % len(WORLDS)]
    job.launch(NUM_KILLS, world=world, under_torchrun=True, num_workers=1)
    assert set(job.wait(timeout_s=600)) == {0}, job.output(NUM_KILLS)

    audit = audit_folder(tmp_path / "steps")
    print("\n".join(lines(audit)))
    assert audit.findings == []
    assert audit.has_keys
    assert (audit.num_repeats, audit.num_gaps) == (0, 0)
    assert [epoch.is_complete for epoch in audit.epochs] == [True] * job.config["epochs"]
    for epoch, delivered in keys_by_epoch(job).items():
        once = Counter(job.keys)
        whole_steps = len(job.keys) // GLOBAL_BATCH * GLOBAL_BATCH
        if job.config["tail"] == "drop":
            assert (delivered.total(), max(delivered.values())) == (whole_steps, 1), f"epoch {epoch}"
        elif job.config["tail"] == "pad":
            assert (delivered | once, delivered.total()) == (delivered, whole_steps + GLOBAL_BATCH), f"epoch {epoch}"
        else:
            assert delivered == once, f"epoch {epoch}"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["audit", str(tmp_path / "steps"), "--json"]) == 0
    assert json.loads(printed.getvalue())["num_gaps"] == 0


def reach(job: Job, attempt: int, num_steps: int, *, world: int) -> None:
    """Wait until rank 0 has got so many batches and every rank is up."""

    def is_there() -> bool:
        ended = [launcher.poll() for launcher in job.launchers]
        assert ended == [None] * len(ended), f"ended by itself: {ended}\n{job.output(attempt)}"
        return len(job.pids(attempt)) == world and job.num_steps(attempt) >= num_steps

    wait_until(is_there, timeout_s=300)


def daemon_of(cache: Path) -> int:
    """The daemon that runs for the cache directory, and no other process that has its number by now."""
    pid = int((cache / "daemon.lock").read_text())
    assert f"--cache-dir {cache} " in command(pid)
    return pid


def keys_by_epoch(job: Job) -> dict[int, Counter[str]]:
    """What the trainers themselves wrote down, without anything that a later attempt has rolled back.

    Shares no code with the audit. A step is named by where it ends; an end of epoch is row 0 of the next.
    """
    steps: dict[tuple[int, int], dict[int, list[str]]] = {}
    for attempt in range(NUM_KILLS + 1):
        for path in sorted(job.folder.glob(f"got-{attempt:03d}-*.jsonl")):
            # A rank may have been killed in the middle of a line: of a step that was not saved yet.
            whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            lines = [json.loads(line) for line in whole]
            if not lines:
                continue
            loaded = tuple(lines[0]["loaded"])
            # An attempt's ranks are read one after another: each takes back only what earlier attempts left.
            for until in [until for until in steps if until > loaded]:
                steps[until] = {owner: keys for owner, keys in steps[until].items() if owner // 100 == attempt}
            for line in lines[1:]:
                part = steps.setdefault(tuple(line["until"]), {})
                owner = attempt * 100 + int(path.stem.rpartition("-")[2])
                assert owner not in part
                part[owner] = line["keys"]
    epochs: dict[int, Counter[str]] = {}
    for (epoch, row), parts in steps.items():
        for keys in parts.values():
            epochs.setdefault(epoch if row else epoch - 1, Counter()).update(keys)
    return epochs
