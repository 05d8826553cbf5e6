"""Trains a small CNN on images in WebDataset tars; start it again with the same command line whenever it stopped.

torchrun --standalone --nproc-per-node=2 examples/train_vision.py --data /tmp/digits --output /tmp/run
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cacheloader as cl


def decode(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A tar sample as tensors, shifted by up to two pixels: by the same ones after any resume."""
    encoded = sample["jpg"] if "jpg" in sample else sample["png"]
    pixels = np.asarray(Image.open(io.BytesIO(encoded)).convert("L").resize((32, 32)), dtype=np.float32) / 255
    pixels = np.roll(pixels, rng.integers(-2, 3, size=2), axis=(0, 1))
    return {"image": torch.from_numpy(pixels)[None], "label": int(sample["cls"])}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 8 * 8, 10),
    )  # fmt: skip


def main(options: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    # Saves in the background talk over gloo, also where training talks over NCCL.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)

    dataset = cl.RemoteDataset(
        options.data,
        seed=17,
        transform=decode,
        storage_options=options.storage_options,
        cache_dir=f"{options.output}/cache",
        cache_size="2GiB",
        lanes=options.lanes,
    )
    loader = cl.DataLoader(
        dataset, batch_size=options.global_batch // world_size, num_workers=options.workers, device=device
    )
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(loader))

    with (
        cl.goodput.Run(f"{options.output}/goodput"),
        cl.Checkpointer(
            options.checkpoints or f"{options.output}/checkpoints",
            model=model,
            optimizer=optimizer,
            loader=loader,
            schedule=schedule,
            keep_last=3,
            start_over="if_never_committed",
            stop_signal=signal.SIGTERM,
            storage_options=options.storage_options,
        ) as checkpoints,
    ):
        step = checkpoints.restore_latest()
        if rank == 0:
            print(f"{world_size} ranks, from step {step}", flush=True)
        for epoch in range(loader.epoch, options.epochs):
            num_right = num_seen = 0
            for batch in loader:
                logits = model(batch["image"])
                loss = nn.functional.cross_entropy(logits, batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                step += 1
                num_right += int((logits.argmax(1) == batch["label"]).sum())
                num_seen += len(batch["label"])
                if step % options.save_every == 0:
                    checkpoints.save(step)
                checkpoints.exit_if_stopped(step)
            if rank == 0 and num_seen:
                print(f"epoch {epoch}: step {step}, {num_right / num_seen:.1%} right", flush=True)
        if checkpoints.committed_step != step:
            checkpoints.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ and not {"-h", "--help"} & set(sys.argv):
        sys.exit(
            f"{sys.argv[0]} is one rank of a job; start it by torchrun --standalone --nproc-per-node=2 {sys.argv[0]} …"
        )
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder or URL of the shards")
    parser.add_argument("--output", required=True, help="folder of this run")
    parser.add_argument("--checkpoints", help="folder or URL for checkpoints, by default below --output")
    parser.add_argument("--storage-options", type=json.loads, help="of the store, as a JSON object")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=96, help="over all ranks; it stays when ranks change")
    parser.add_argument("--lanes", type=int, default=4, help="fixed for the run; has to divide the global batch")
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    parser.add_argument("--workers", type=int, default=1, help="of the loader, per rank")
    main(parser.parse_args())
