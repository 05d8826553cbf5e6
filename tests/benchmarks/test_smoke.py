from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Programs that start servers, and contestants one by one: seconds here, a minute on a machine that is busy.
pytestmark = pytest.mark.timeout(300)


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_small_run_of_the_ceilings_writes_a_report_and_leaves_nothing(tmp_path):
    work, output = tmp_path / "work", tmp_path / "reports"
    done = benchmarks(
        "--small", "--repeats", "1", "--only", "engine", "--only", "pread",
        "--machine", "smoke", "--work", str(work), "--output", str(output),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [data] = output.glob("two-epochs-small_smoke_*.json")
    content = json.loads(data.read_text())
    [measured] = content["rounds"]
    assert len(measured) == 6
    for label, measurement in measured.items():
        assert measurement["verified"]["samples"] == content["parameters"]["samples"], label
    [cold] = measured["engine (ceiling)"]["phases"]
    assert cold["origin_bytes"] > cold["size_bytes"], "the store counts what it sends, tar headers included"
    assert list(work.iterdir()) == []
    text = data.with_suffix(".md").read_text()
    assert str(tmp_path) not in data.read_text() + text
    assert os.uname().nodename not in data.read_text() + text


def test_small_run_of_what_a_position_costs(tmp_path):
    done = benchmarks(
        "--scenario", "position", "--small", "--repeats", "1", "--only", "resume", "--only", "state, middle",
        "--machine", "smoke", "--work", str(tmp_path / "work"), "--output", str(tmp_path / "reports"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [data] = (tmp_path / "reports").glob("position-small_smoke_*.json")
    [measured] = json.loads(data.read_text())["rounds"]
    assert len(measured) == 2


def test_small_run_of_a_recovery_finds_every_blob_without_an_index(tmp_path):
    done = benchmarks(
        "--scenario", "recovery", "--small", "--repeats", "1", "--only", "deleted",
        "--machine", "smoke", "--work", str(tmp_path / "work"), "--output", str(tmp_path / "reports"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [data] = (tmp_path / "reports").glob("recovery-small_smoke_*.json")
    content = json.loads(data.read_text())
    [measured] = content["rounds"]
    assert measured["index deleted"]["verified"]["samples"] == content["parameters"]["blobs"] == 2008


def test_a_run_that_is_stopped_reports_its_complete_rounds_and_leaves_nothing(tmp_path):
    work, output = tmp_path / "work", tmp_path / "reports"
    process = subprocess.Popen(
        [
            sys.executable, "-m", "benchmarks", "--small", "--repeats", "100000", "--only", "engine (ceiling)",
            "--work", str(work), "--output", str(output),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        while "[3/100000]" not in (line := process.stdout.readline()):
            assert line, "it ended by itself"
        process.terminate()
        said, _ = process.communicate(timeout=200)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    [text] = output.glob("*.md")
    [num_reported] = map(int, re.findall(r"was stopped after (\d+) of 100000 rounds", text.read_text()))
    # It may have gone on before the signal came: its last round may be one that was told and not yet counted.
    num_told = max([3, *map(int, re.findall(r"^\[(\d+)/100000\]", said, re.MULTILINE))])
    assert num_told - 1 <= num_reported <= num_told
    assert list(work.iterdir()) == []
    assert processes_with(str(work)) == []


def processes_with(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_only_that_matches_nothing_names_the_contestants(tmp_path):
    done = benchmarks("--small", "--only", "nobody", "--work", str(tmp_path), "--output", str(tmp_path))
    assert done.returncode == 2
    assert "engine (ceiling)" in done.stderr


@pytest.mark.parametrize(
    ("contestant", "words"),
    [
        ("tests.benchmarks.contestants:Crashes", "RuntimeError: on purpose … the end"),
        ("tests.benchmarks.contestants:Dies", "ended with status -9: its last words"),
        ("tests.benchmarks.contestants:Hangs", "had not ended after"),
        ("tests.benchmarks.contestants:LosesASample", "were asked for"),
    ],
)
def test_a_contestant_that_fails_hangs_or_loses_samples_is_reported_and_the_others_go_on(tmp_path, contestant, words):
    said = runner_says(RUN_ONE, tmp_path, contestant)
    assert words in said["failed"]
    assert said["others"] == ["well"], "the others go on"
    assert list(tmp_path.iterdir()) == []


def test_what_a_contestant_leaves_running_is_ended(tmp_path):
    [left] = runner_says(RUN_ONE, tmp_path, "tests.benchmarks.contestants:LeavesAProcess")["left"]
    assert not Path(f"/proc/{left}").exists()


def runner_says(code: str, folder: Path, contestant: str) -> Any:
    """What ``code``, which is ``RUN_ONE`` or begins like it, prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), contestant],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


RUN_ONE = """
import json, sys
from pathlib import Path
from benchmarks.harness.contestant import Task
from benchmarks.harness.measurement import Tally
from benchmarks.harness.meter import sample_checksum
from benchmarks.harness.runner import Entry, Runner

folder, factory = sys.argv[1:]
checksum = sum(sample_checksum(key, b"x") for key in "ab")
task = Task(
    folder="", source_folder="", reads="", shard_names=[], shard_bytes=[], store=None,
    expected=Tally(samples=2, size_bytes=2, checksum=checksum), batch_size=1, num_workers=0, warm_epochs=1,
)

class Impatient(Runner):
    # Waits long for all but the one that hangs, which would take all of that.
    def _spawn(self, entry, home):
        self._timeout_s = 2 if "Hangs" in entry.factory else 100
        return super()._spawn(entry, home)


runner = Impatient(Path(folder), calm_timeout_s=0, memory_bytes=0, say=lambda text: None)
entries = [
    Entry(label="it", factory=factory, task=task),
    Entry(label="well", factory="tests.benchmarks.contestants:LeavesAProcess", task=task),
]
[done] = runner.rounds(entries, repeats=1)
it = done.measured.get("it")
print(json.dumps({
    "left": it.configuration["left"] if it else [],
    "failed": str(done.failed.get("it")),
    "others": [label for label in done.measured if label != "it"],
}))
"""


def test_small_run_of_what_a_gigabyte_costs(tmp_path):
    done = benchmarks(
        "--scenario", "fetch-cost", "--small", "--repeats", "1", "--only", "memory reused", "--only", "daemon",
        "--machine", "smoke", "--work", str(tmp_path / "work"), "--output", str(tmp_path / "reports"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [data] = (tmp_path / "reports").glob("fetch-cost-small_smoke_*.json")
    content = json.loads(data.read_text())
    [measured] = content["rounds"]
    assert len(measured) == 2
    assert "wake-ups/s" in measured["daemon"]["configuration"]["at rest, no client"]
    # CPU time comes in ticks: what took none of so little data has no ratio.
    assert {ratio["figure"] for ratio in content["ratios"]} <= {"CPU s/GB"}


def test_a_peer_that_fails_is_a_line_in_the_report_and_the_product_that_fails_is_the_end():
    from benchmarks.harness.measurement import Failure, Round
    from benchmarks.running import owed_failures

    failed = Round(
        measured={}, failed={"peer": Failure(kind="hung", message=""), "ours": Failure(kind="x", message="")}
    )
    assert owed_failures([failed], peers={"peer"}) == ["ours"]
    assert owed_failures([failed], peers={"peer", "ours"}) == []


def test_without_time_for_another_round_none_is_begun_and_one_that_fails_twice_is_not_tried_again(tmp_path):
    code = RUN_ONE.split("[done] =", maxsplit=1)[0] + (
        "short = list(runner.rounds(entries[1:], repeats=5, budget_s=0))\n"
        "rounds = list(runner.rounds(entries, repeats=3))\n"
        "print(json.dumps([len(short), [len(one.failed) for one in rounds], [len(one.measured) for one in rounds]]))\n"
    )
    assert runner_says(code, tmp_path, "tests.benchmarks.contestants:Crashes") == [1, [1, 1, 0], [1, 1, 1]]


def test_rounds_differ_in_order_and_calls_do_not(tmp_path):
    code = RUN_ONE.split("[done] =", maxsplit=1)[0] + (
        "twice = [[list(one.measured) for one in runner.rounds(entries, repeats=3)] for _ in range(2)]\n"
        "print(json.dumps(twice))\n"
    )
    orders, again = runner_says(code, tmp_path, "tests.benchmarks.contestants:LeavesAProcess")
    assert orders == again
    assert orders[0] == ["it", "well"]
    assert ["well", "it"] in orders
