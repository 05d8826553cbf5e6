"""A job is killed with SIGKILL inside a save, at each place where that could matter.

CACHELOADER_TEST_KILLS=20 adds the places that other tests reach by chance.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cacheloader.checkpoint.store import FolderStore
from cacheloader.errors import NoValidCheckpoint
from tests.checkpoint.jobs import Job, flip_bit, saved, saves
from tests.support.node_daemon import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)  # each starts a python with torch

SCRIPT = """
import os, signal, sys
from contextlib import contextmanager
from cacheloader.checkpoint.store import FolderStore
from tests.checkpoint.jobs import Job

folder, name, when, mode, found = sys.argv[1:]
real = FolderStore.writing

@contextmanager
def writing(self, path):
    with real(self, path) as stream:
        yield stream
        if path.endswith(name) and when == "before":
            stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    if path.endswith(name) and when == "after":
        os.kill(os.getpid(), signal.SIGKILL)

job = Job()
with job.checkpointer(folder, mode=mode) as checkpoints:
    assert checkpoints.restore_latest() == int(found)
    FolderStore.writing = writing
    job.step()
    checkpoints.save(2)
"""


PLACES = [("__0_0.distcp", "before", "thread", 1), ("commit.json", "before", "thread", 1)]
if int(os.environ.get("CACHELOADER_TEST_KILLS", "0")) > 5:
    PLACES += [
        ("__0_0.distcp", "after", "sync", 1),
        (".metadata", "after", "thread", 1),
        ("commit.json", "after", "thread", 2),
    ]


def kill(folder: Path, name: str, when: str, mode: str, *, found: int) -> None:
    """A job that finds the save of step ``found`` and is killed in the next one."""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder), name, when, mode, str(found)]
    done = subprocess.run(command, env=environment, timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("name", "when", "mode", "step"), PLACES)
def test_a_save_that_was_killed_is_chosen_only_if_its_commit_was_complete(
    tmp_path: Path, name: str, when: str, mode: str, step: int
) -> None:
    saved(tmp_path, steps=1)
    kill(tmp_path, name, when, mode, found=1)
    job = Job(seed=3)
    with job.checkpointer(tmp_path, keep_last=1) as checkpoints:
        assert checkpoints.restore_latest() == step
        assert len(checkpoints.skipped) == (step == 1)
        checkpoints.save(step + 1)
    assert [path for path in FolderStore(tmp_path).top() if "-step-" in path] == [
        next(path for path in FolderStore(tmp_path).top() if f"-step-{step + 1}-" in path)
    ], "what was interrupted is cleaned away by the next commit"


def test_a_kill_before_the_first_commit_leaves_a_folder_that_was_never_committed(tmp_path: Path) -> None:
    kill(tmp_path, "commit.json", "before", "sync", found=0)
    with Job().checkpointer(tmp_path, start_over="if_never_committed") as checkpoints:
        assert checkpoints.restore_latest() == 0


def test_a_kill_right_after_the_first_commit_leaves_a_folder_that_was_committed(tmp_path: Path) -> None:
    kill(tmp_path, "commit.json", "after", "sync", found=0)
    flip_bit(saves(tmp_path)[0] / "__0_0.distcp", at=100)
    with (
        Job().checkpointer(tmp_path, start_over="if_never_committed") as checkpoints,
        pytest.raises(NoValidCheckpoint),
    ):
        checkpoints.restore_latest()
