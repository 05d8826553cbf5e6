"""One rank of a job without a model that is killed again and again: ``killed_trainer.py CONFIG.json``, under torchrun.

Each step it takes a batch, writes down by itself what it got, and meets the other ranks in one all_reduce. Rank 0 saves
the loader's position every few steps, as a trainer saves its checkpoint.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cacheloader as cl


def key_of(sample: dict[str, Any]) -> str:
    return sample["__key__"]


def main(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    rank = int(os.environ["RANK"])
    (folder / f"pid-{config['attempt']}-{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    dataset = cl.RemoteDataset(
        config["urls"],
        seed=config["seed"],
        shuffle_window=2,
        tail=config["tail"],
        transform=key_of,
        cache_dir=config["cache_dir"],
        cache_size="64MiB",
    )
    loader = cl.DataLoader(
        dataset,
        batch_size=config["global_batch"] // dist.get_world_size(),
        num_workers=config["num_workers"],
        collate_fn=list,
        record_to=folder / "steps",
        record_keys=True,
    )
    saved = folder / "checkpoint.json"
    if saved.exists():
        loader.load_state_dict(json.loads(saved.read_text()))
    state = loader.state_dict()
    log = os.open(folder / f"got-{config['attempt']:03d}-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, json.dumps({"loaded": [state["epoch"], state["row"]]}).encode() + b"\n")
    num_steps = 0
    for _ in range(loader.epoch, config["epochs"]):
        for keys in loader:
            state = loader.state_dict()
            os.write(log, json.dumps({"until": [state["epoch"], state["row"]], "keys": keys}).encode() + b"\n")
            here = state["epoch"] * 10**6 + state["row"]
            seen = torch.tensor([1, here])
            dist.all_reduce(seen)
            assert seen.tolist() == [dist.get_world_size(), dist.get_world_size() * here], "ranks at different places"
            num_steps += 1
            if rank == 0 and num_steps % config["save_every"] == 0:
                half = saved.with_suffix(".half")
                half.write_text(json.dumps(state))
                half.replace(saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
