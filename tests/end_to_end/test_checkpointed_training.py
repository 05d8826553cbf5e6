"""A job under torchrun is killed with SIGKILL at random moments; its losses are those of one that never was.

CACHELOADER_TEST_KILLS=20 runs the long form, with four ranks, then six, then two. CACHELOADER_TEST_SEED repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from cacheloader.checkpoint.cli import rows
from cacheloader.checkpoint.store import open_store
from cacheloader.transport.control import stop_daemon
from tests.support.node_daemon import REPOSITORY, is_running
from tests.support.parent_death import die_with_parent
from tests.support.seaweedfs import storage_options
from tests.support.shard_sets import write_shards
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_KILLS = int(os.environ.get("CACHELOADER_TEST_KILLS", "3"))
SEED = int(os.environ.get("CACHELOADER_TEST_SEED", random.SystemRandom().randrange(10**6)))
GLOBAL_BATCH = 12
SAMPLES = 120
STEPS_PER_EPOCH = SAMPLES // GLOBAL_BATCH
IS_LONG = NUM_KILLS > 5
EPOCHS = 3 * NUM_KILLS if IS_LONG else 2
RANKS, OTHERS = (4, (6, 2)) if IS_LONG else (3, (2, 1))  # the order in which two ranks are added up changes nothing
TRAINER = REPOSITORY / "tests" / "support" / "checkpointed_trainer.py"


@dataclass
class Run:
    """A job's folder and its attempts."""

    folder: Path
    config: dict[str, Any]
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def launch(self, attempt: int, *, world: int) -> subprocess.Popen[bytes]:
        path = self.folder / f"config-{attempt}.json"
        path.write_text(json.dumps(self.config | {"attempt": attempt, "folder": str(self.folder)}))
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        # What a rank gets to save its step before torchrun kills it: 30 s by default.
        command += ["--shutdown-timeout=120", str(TRAINER), str(path)]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_ADDR2LINE": "1",
        }
        with (self.folder / f"output-{attempt}.txt").open("ab") as output:
            launcher = subprocess.Popen(
                die_with_parent([sys.executable, *command]), stdout=output, stderr=output, env=environment
            )
        self.launchers.append(launcher)
        return launcher

    def pids(self, attempt: int) -> dict[int, int]:
        files = self.folder.glob(f"pid-{attempt}-*")
        said = {int(path.name.rpartition("-")[2]): path.read_text() for path in files}
        return {rank: int(pid) for rank, pid in said.items() if pid}  # or it is about to be written

    def lines(self, attempt: int, rank: int) -> list[dict[str, Any]]:
        """What one rank wrote, without a torn last line."""
        path = self.folder / f"log-{attempt:03d}-{rank}.jsonl"
        if not path.exists():
            return []
        whole, _, _ = path.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def step(self, attempt: int, rank: int = 0) -> int:
        lines = self.lines(attempt, rank)
        return lines[-1].get("step", 0) if lines else 0

    def output(self, attempt: int) -> str:
        """The end of what all ranks printed; what they wrote down when they stalled comes last."""
        text = (self.folder / f"output-{attempt}.txt").read_text()
        _, stalled, where = text.partition("Current thread 0x")
        return f"{text[-4000:]}\n{stalled}{where[:12000]}"

    def reach(self, attempt: int, step: int, *, world: int) -> None:
        """Wait until every rank has written down so many steps."""
        launcher = self.launchers[-1]

        def is_there() -> bool:
            assert launcher.poll() is None, self.output(attempt)
            return all(self.step(attempt, rank) >= step for rank in range(world))

        wait_until(is_there, timeout_s=400)

    def finish(self, attempt: int) -> int:
        return self.launchers[-1].wait(400)

    def kill(self, attempt: int) -> None:
        self.launchers[-1].kill()
        for pid in self.pids(attempt).values():
            kill(pid)
        self.launchers[-1].wait(60)
        wait_until(lambda: not any(is_running(pid) for pid in self.pids(attempt).values()))

    def restored(self, attempt: int) -> int:
        return int(self.lines(attempt, 0)[0]["restored"])

    def steps(self, attempt: int) -> dict[int, list[dict[str, Any]]]:
        """Lines of all ranks by step, of steps that every rank has completed."""
        by_rank = [self.lines(attempt, rank) for rank in range(len(self.pids(attempt)))]
        found: dict[int, list[dict[str, Any]]] = {}
        for line in (line for lines in by_rank for line in lines if "step" in line):
            found.setdefault(line["step"], []).append(line)
        return {step: lines for step, lines in found.items() if len(lines) == len(by_rank)}


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    shards = write_shards(tmp_path / "shards", num_shards=6, samples_per_shard=SAMPLES // 6, sample_bytes=400)
    runs: list[Run] = []

    def run(name: str, **config: Any) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        base = {
            "urls": str(shards.folder),
            "cache_dir": str(tmp_path / "cache"),
            "checkpoints": str(folder / "checkpoints"),
            "global_batch": GLOBAL_BATCH,
            "save_every": 2,
            "epochs": EPOCHS,
        }
        runs.append(Run(folder=folder, config=base | config))
        return runs[-1]

    yield run
    for one in runs:
        for attempt, launcher in enumerate(one.launchers):
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()
            for pid in one.pids(attempt).values():
                kill(pid)
    stop_daemon(tmp_path / "cache", timeout_s=60)


@pytest.fixture
def reference(make: Any) -> dict[int, list[dict[str, Any]]]:
    """What an uninterrupted job writes."""
    run = make("reference")
    run.launch(0, world=RANKS)
    assert run.finish(0) == 0, run.output(0)
    steps = run.steps(0)
    assert sorted(steps) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    return steps  # type: ignore[no-any-return]


def keys(lines: list[dict[str, Any]]) -> Counter[str]:
    return Counter(key for line in lines for key in line["keys"])


@pytest.mark.slow
@pytest.mark.timeout(6000 if IS_LONG else 1500)
def test_a_killed_job_repeats_every_loss_and_on_other_ranks_every_sample(
    make: Any, reference: dict[int, list[dict[str, Any]]]
) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}, {NUM_KILLS} kills")
    run: Run = make("killed")
    last_step = EPOCHS * STEPS_PER_EPOCH
    final: dict[int, Counter[str]] = {}
    num_compared = 0
    elastic = [RANKS] * (NUM_KILLS - 1) + list(OTHERS)
    for attempt, world in enumerate(elastic):
        is_last = attempt == len(elastic) - 1
        # One that is to be killed does not end before, however long nobody looks.
        run.config["waits_at"] = 0 if is_last else last_step - 1
        run.launch(attempt, world=world)
        if not is_last:
            before = run.restored(attempt - 1) if attempt else 0
            most = min(before + last_step // 3, last_step - 2)
            run.reach(attempt, rng.randint(min(before + 3, most), most), world=world)
            time.sleep(rng.random() * 0.2)
            if rng.random() < 0.5:
                kill(run.pids(attempt)[rng.randrange(world)])
                time.sleep(rng.random() * 0.5)  # the others go on for a moment, until they miss the dead one
            run.kill(attempt)
        else:
            assert run.finish(attempt) == 0, run.output(attempt)
        restored = run.restored(attempt)
        print(f"attempt {attempt}: {world} ranks, resumed from {restored}, reached {run.step(attempt)}")
        for line in run.lines(attempt, 0)[:1]:
            print("\n".join(line["skipped"]))
        assert all(step > restored for step in run.steps(attempt))
        for step in [step for step in final if step > restored]:
            del final[step]
        for step, lines in run.steps(attempt).items():
            final[step] = keys(lines)
            if world == RANKS:
                assert [(line["loss"], line["own"], line["keys"]) for line in lines] == [
                    (line["loss"], line["own"], line["keys"]) for line in reference[step]
                ], f"step {step} of attempt {attempt} differs from the uninterrupted run"
                num_compared += 1
    print(f"{num_compared} steps of {RANKS} ranks compared bit for bit")
    assert num_compared > 3
    assert sorted(final) == sorted(reference)
    for step, got in final.items():
        assert got == keys(reference[step]), f"other samples in step {step}"
    for epoch in range(EPOCHS):
        first = epoch * STEPS_PER_EPOCH
        total: Counter[str] = sum((final[step] for step in range(first + 1, first + STEPS_PER_EPOCH + 1)), Counter())
        assert total.total() == SAMPLES
        assert set(total.values()) == {1}
    listed = rows(open_store(run.config["checkpoints"]), read_bytes=True)
    assert listed[0].step == last_step
    assert listed[0].reason == ""
    assert len([row for row in listed if not row.reason]) == 3, "retention keeps three"


@pytest.mark.timeout(900)
def test_sigterm_to_torchrun_with_loader_workers_saves_the_step_under_way_and_it_resumes_there(
    make: Any, s3_server: Any, bucket: str, prefix: str
) -> None:
    options = storage_options(s3_server.endpoint_url)
    url = f"s3://{bucket}/{prefix}ckpt"
    run: Run = make("stopped", checkpoints=url, storage_options=options, save_every=10**6, epochs=10**6)
    launcher = run.launch(0, world=2)
    run.reach(0, 3, world=2)
    launcher.terminate()
    launcher.wait(150)
    [row] = rows(open_store(url, options), read_bytes=True)
    assert (row.reason, row.world_size) == ("", 2)
    assert row.step == run.step(0), "it left after another step than it saved"
    assert {rank: run.lines(0, rank)[-1]["step"] for rank in (0, 1)} == {0: row.step, 1: row.step}
    run.config["epochs"] = 1 + row.step // STEPS_PER_EPOCH
    run.launch(1, world=2)
    assert run.finish(1) == 0, run.output(1)
    assert run.restored(1) == row.step
