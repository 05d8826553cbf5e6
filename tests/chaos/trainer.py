"""One rank of the job that the chaos run breaks; the launcher starts it with the path of its configuration.

It writes down the key and the digest of every sample it gets and meets the other ranks in one all_reduce a step. Rank 0
saves the loader's position every few steps. It ends with the first epoch that ends after the file ``stop`` is there.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cacheloader as cl
from tests.support.shard_sets import digest


def key_and_digest(sample: dict[str, Any]) -> tuple[str, str]:
    return sample["__key__"], digest(sample)


def main(config: dict[str, Any]) -> None:
    folder, attempt = Path(config["folder"]), int(config["attempt"])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        # A port that was free when it was chosen may be somebody else's once the ranks have imported torch.
        init_method=f"file://{config['rendezvous']}",
        rank=rank,
        world_size=config["world"],
        timeout=datetime.timedelta(seconds=120),
    )
    dataset = cl.RemoteDataset(
        config["url"],
        seed=config["seed"],
        lanes=config["lanes"],
        shuffle_window=2,
        tail="keep",
        transform=key_and_digest,
        storage_options=config["storage_options"],
        cache_dir=config["cache_dir"],
        cache_size=config["cache_size"],
    )
    loader = cl.DataLoader(
        dataset,
        batch_size=config["global_batch"] // dist.get_world_size(),
        num_workers=config["num_workers"],
        collate_fn=list,
    )
    saved = folder / "checkpoint.json"
    if saved.exists():
        loader.load_state_dict(json.loads(saved.read_text()))
    state = loader.state_dict()
    log = os.open(folder / f"got-{attempt:04d}-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, json.dumps({"loaded": [state["epoch"], state["row"]]}).encode() + b"\n")
    num_steps = 0
    is_last = False
    while not is_last:
        for samples in loader:
            state = loader.state_dict()
            line = {"until": [state["epoch"], state["row"]], "samples": samples}
            os.write(log, json.dumps(line).encode() + b"\n")
            dist.all_reduce(torch.zeros(1))
            time.sleep(config["step_s"])
            num_steps += 1
            if rank == 0 and num_steps % config["save_every"] == 0:
                save(saved, loader.state_dict())
        if rank == 0:
            save(saved, loader.state_dict())
        wish = torch.tensor([int((folder / "stop").exists())])
        dist.all_reduce(wish, op=dist.ReduceOp.MIN)  # the ranks look at different moments
        is_last = bool(wish.item())
    dist.destroy_process_group()


def save(path: Path, state: dict[str, Any]) -> None:
    half = path.with_suffix(".half")
    half.write_text(json.dumps(state))
    half.replace(path)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
