"""One rank of a training job that is killed again and again: ``checkpointed_trainer.py CONFIG.json``, under torchrun.

Model with dropout under DDP, AdamW, data through a daemon, transform with random draws, a checkpoint every few steps.
Each step's global loss and this rank's sample keys are written down, one line a step, by the trainer itself.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cacheloader as cl

WIDTH = 16
STALL_S = 40.0
"""Where a step takes longer, this rank and its workers write down where every thread of theirs is."""
TIMEOUT_S = 150.0


def features(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    """A vector that depends on the sample's bytes and on chance."""
    head = torch.frombuffer(bytearray(sample["bin"][:WIDTH]), dtype=torch.uint8).float() / 255
    return {"key": sample["__key__"], "x": head + torch.from_numpy(rng.normal(size=WIDTH)).float() * 0.01}


def tell_where_it_stalls(alive: threading.Event) -> None:
    """In a thread: whenever ``alive`` is not set in time, ask this process and its workers where they are."""
    while True:
        if not alive.wait(STALL_S):
            for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
                os.kill(pid, signal.SIGUSR1)
            alive.wait()
        alive.clear()


def main(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    rank = int(os.environ["RANK"])
    faulthandler.register(signal.SIGUSR1)  # forked workers inherit it
    alive = threading.Event()
    threading.Thread(target=tell_where_it_stalls, args=[alive], daemon=True).start()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    (folder / f"pid-{config['attempt']}-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(rank)  # dropout differs between ranks, so each rank's state matters
    dataset = cl.RemoteDataset(
        config["urls"],
        seed=3,
        shuffle_window=2,
        transform=features,
        cache_dir=config["cache_dir"],
        cache_size="64MiB",
        lanes=4,
    )
    loader = cl.DataLoader(dataset, batch_size=config["global_batch"] // dist.get_world_size(), num_workers=1)
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    # Else the first step of a process sums gradients in another order than those behind it, see docs/checkpoints.md.
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    log = os.open(folder / f"log-{config['attempt']:03d}-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with cl.Checkpointer(
        config["checkpoints"],
        model=model,
        optimizer=optimizer,
        loader=loader,
        schedule=schedule,
        mode=config.get("mode", "thread"),
        keep_last=3,
        start_over="if_never_committed",
        stop_signal=signal.SIGTERM,
        storage_options=config.get("storage_options"),
        timeout_s=TIMEOUT_S,
    ) as checkpoints:
        step = checkpoints.restore_latest()
        os.write(
            log, json.dumps({"restored": step, "skipped": [str(one) for one in checkpoints.skipped]}).encode() + b"\n"
        )
        while loader.epoch < config["epochs"]:
            for batch in loader:
                alive.set()
                loss = (model(batch["x"]).squeeze() - batch["x"].sum(1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                step += 1
                total = loss.detach().clone()
                dist.all_reduce(total)
                line = {"step": step, "loss": total.item().hex(), "own": loss.item().hex(), "keys": batch["key"]}
                os.write(log, json.dumps(line).encode() + b"\n")
                if step % config["save_every"] == 0:
                    checkpoints.save(step)
                checkpoints.exit_if_stopped(step)
                while step == config.get("waits_at"):
                    time.sleep(0.05)
                    alive.set()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
