"""Trains a small language model on blocks of tokens; start it again with the same command line whenever it stopped.

torchrun --standalone --nproc-per-node=2 examples/train_tokens.py --data /tmp/tokens --output /tmp/run

The model is sharded by FSDP2, so each rank saves its shard, and any other number of ranks can go on from there.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cacheloader as cl

VOCABULARY = 256  # a token is a byte, see make_tokens.py


def block(sample: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(sample["tokens.npy"])).astype(np.int64))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, *, length: int, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for part in self.blocks:
            x = part(x)
        return self.head(x.flatten(0, 1))


def main(options: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    # Saves in the background talk over gloo, also where training talks over NCCL.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same first weights on every rank

    dataset = cl.RemoteDataset(
        options.data,
        seed=17,
        transform=block,
        storage_options=options.storage_options,
        cache_dir=f"{options.output}/cache",
        cache_size="2GiB",
        lanes=options.lanes,
    )
    batch_size = options.global_batch // world_size
    loader = cl.DataLoader(dataset, batch_size=batch_size, num_workers=options.workers, device=device)
    model = Model(length=options.length).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for part in model.blocks:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # and different dropout

    with (
        cl.goodput.Run(f"{options.output}/goodput", tokens_per_batch=batch_size * options.length),
        cl.Checkpointer(
            options.checkpoints or f"{options.output}/checkpoints",
            model=model,
            optimizer=optimizer,
            loader=loader,
            keep_last=3,
            start_over="if_never_committed",
            stop_signal=signal.SIGTERM,
            storage_options=options.storage_options,
        ) as checkpoints,
    ):
        step = checkpoints.restore_latest()
        if rank == 0:
            print(f"{world_size} ranks, from step {step}", flush=True)
        while step < options.steps:
            for batch in loader:
                logits = model(batch[:, :-1])
                loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if rank == 0 and step % 10 == 0:
                    print(f"step {step}: loss {loss.item():.4f}", flush=True)
                if step % options.save_every == 0 or step == options.steps:
                    checkpoints.save(step)
                checkpoints.exit_if_stopped(step)
                if step == options.steps:
                    break
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
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=128, help="tokens in a block, without the one to predict last")
    parser.add_argument("--global-batch", type=int, default=24, help="over all ranks; it stays when ranks change")
    parser.add_argument("--lanes", type=int, default=4, help="fixed for the run; has to divide the global batch")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--workers", type=int, default=1, help="of the loader, per rank")
    main(parser.parse_args())
