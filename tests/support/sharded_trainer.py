"""One rank of a job whose model FSDP2 shards: ``sharded_trainer.py FOLDER MODE``, under torchrun.

It goes on at the newest checkpoint, says in one line of JSON what it found there, trains three steps and saves each.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cacheloader as cl


def digest(values: dict[str, Any]) -> str:
    """Of whole tensors, wherever their shards are."""
    hashed = hashlib.sha256()
    for name in sorted(values):
        value = values[name]
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        hashed.update(name.encode() + whole.detach().numpy().tobytes())
    return hashed.hexdigest()


def main(folder: str, mode: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def state() -> dict[str, str]:
        moments = {f"{place}": values["exp_avg"] for place, values in enumerate(optimizer.state.values())}
        return {"model": digest(dict(model.state_dict())), "optimizer": digest(moments)}

    with cl.Checkpointer(
        Path(folder, "ckpt"), model=model, optimizer=optimizer, mode=mode, timeout_s=400
    ) as checkpoints:
        step = checkpoints.restore_latest()
        found = {"step": step, **state()}
        for _ in range(3):
            loss = model(torch.randn(4, 10)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            checkpoints.save(step)
            kept = {"step": step, **state()}
        checkpoints.wait()
    if rank == 0:
        Path(folder, f"said-{world_size}.json").write_text(json.dumps({"found": found, "kept": kept}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
