"""A model that FSDP2 shards, saved by processes of their own, and loaded by another number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from cacheloader.checkpoint.cli import rows
from cacheloader.checkpoint.store import FolderStore
from tests.support.node_daemon import REPOSITORY
from tests.support.parent_death import die_with_parent

if TYPE_CHECKING:
    from pathlib import Path


def launch(folder: Path, mode: str, *, world: int) -> dict[str, Any]:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    script = str(REPOSITORY / "tests" / "support" / "sharded_trainer.py")
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        die_with_parent([sys.executable, *command, script, str(folder), mode]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads((folder / f"said-{world}.json").read_text())
    return said


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_a_sharded_model_saved_by_processes_is_the_same_on_another_number_of_ranks(tmp_path: Path) -> None:
    first = launch(tmp_path, "process", world=2)
    assert first["found"]["step"] == 0
    second = launch(tmp_path, "thread", world=3)
    assert second["found"] == first["kept"]
    assert second["kept"]["step"] == 6
    found = rows(FolderStore(tmp_path / "ckpt"), read_bytes=True)
    assert [(row.step, row.world_size, row.reason) for row in found] == [
        (step, 2 if step <= 3 else 3, "") for step in (6, 5, 4, 3, 2, 1)
    ]
