"""What goes wrong on one rank alone is an error on all of them, at once and not after a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.node_daemon import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import sys
import torch.distributed as dist
from torch import nn
import cacheloader as cl
from cacheloader.checkpoint import checkpointer
from cacheloader.errors import CheckpointError, ConfigError, SaveFailed

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)

class Counter:
    is_plain = rank != 0
    def state_dict(self):
        return {"count": 1 if self.is_plain else object()}
    def load_state_dict(self, state):
        pass

def fail(*_):
    raise CheckpointError("the record cannot be read back")

counter = Counter()
model = nn.Linear(2, 2)
with cl.Checkpointer(f"{folder}/ckpt", model=model, counter=counter, start_over="always", timeout_s=900) as checkpoints:
    try:
        checkpoints.save(1)
    except ConfigError as error:
        print("refused", "rank 0" in str(error) or rank == 0)
    counter.is_plain = True
    real, checkpointer.read_commit = checkpointer.read_commit, fail if rank == 0 else checkpointer.read_commit
    checkpoints.save(2)
    try:
        checkpoints.save(3)
    except SaveFailed as error:
        print("failed", "cannot be read back" in str(error))
    checkpointer.read_commit = real
    checkpoints.save(4)
    checkpoints.wait()
    print("committed", checkpoints.committed_step)
dist.destroy_process_group()
"""


@pytest.mark.timeout(600)
def test_what_fails_on_rank_0_alone_is_raised_on_every_rank_and_the_next_save_is_good(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path), str(rank)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=240)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert said == [["refused True", "failed True", "committed 4"]] * 2
