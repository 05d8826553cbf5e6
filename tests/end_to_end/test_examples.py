"""The scripts in ``examples/``, run as their README says, twice: the second run goes on where the first ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cacheloader.cli import main
from cacheloader.transport.control import stop_daemon
from tests.support.node_daemon import REPOSITORY
from tests.support.parent_death import die_with_parent

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = REPOSITORY / "examples"


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        die_with_parent([sys.executable, *command]), env=environment, capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def torchrun(script: str, *options: str) -> str:
    return run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(EXAMPLES / script), *options)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_token_example_goes_on_and_its_checkpoints_and_goodput_can_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question; " * 2000)
    run(str(EXAMPLES / "make_tokens.py"), str(tmp_path / "tokens"), str(text))
    options = ["--data", str(tmp_path / "tokens"), "--output", str(tmp_path / "run"), "--save-every", "3"]
    try:
        assert "from step 0" in torchrun("train_tokens.py", *options, "--steps", "5")
        printed = torchrun("train_tokens.py", *options, "--steps", "10")
    finally:
        stop_daemon(tmp_path / "run" / "cache", timeout_s=60)
    assert "from step 5" in printed
    assert "step 10: loss" in printed
    assert main(["ckpt", "ls", str(tmp_path / "run" / "checkpoints"), "--verify", "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [10, 9, 6]
    assert main(["goodput", str(tmp_path / "run" / "goodput")]) == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_vision_example_goes_on_where_it_ended(tmp_path: Path) -> None:
    run(str(EXAMPLES / "make_digits.py"), str(tmp_path / "digits"))
    options = ["--data", str(tmp_path / "digits"), "--output", str(tmp_path / "run"), "--workers", "0"]
    try:
        assert "epoch 0: step 18" in torchrun("train_vision.py", *options, "--epochs", "1")
        printed = torchrun("train_vision.py", *options, "--epochs", "2")
    finally:
        stop_daemon(tmp_path / "run" / "cache", timeout_s=60)
    assert "from step 18" in printed
    assert "epoch 1: step 36" in printed


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["make_tokens.py"], "name the folder for the shards"),
        (["train_tokens.py", "--data", "x", "--output", "y"], "start it by torchrun"),
    ],
)
def test_a_script_that_was_started_the_wrong_way_says_the_right_one(command: list[str], words: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = f"{REPOSITORY}:{REPOSITORY}/daemon"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / command[0]), *command[1:]],
        env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
