"""The demo's training job, an ordinary torch script: ``python -m cacheloader.demo.trainer CONFIG.json``.

It appends one JSON line per batch to its log and saves the loader's position together with the model, so that it can
be killed at any moment and started again with the same command line.
"""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch
from PIL import Image
from torch import nn

import cacheloader as cl

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE_PIXELS = 32


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """A tar sample as tensors: image float32 [1, 32, 32] in [0, 1], label, and the key for the log."""
    encoded = sample["jpg"] if "jpg" in sample else sample["png"]
    image = Image.open(io.BytesIO(encoded))
    image.draft("L", (SIDE_PIXELS, SIDE_PIXELS))
    pixels = np.asarray(image.convert("L").resize((SIDE_PIXELS, SIDE_PIXELS)), dtype=np.float32)
    return {
        "image": torch.from_numpy(pixels / 255)[None],
        "label": int(sample["cls"]),
        "key": sample["__key__"],
        "size_bytes": len(encoded) + len(sample["cls"]),
    }


def network() -> nn.Module:
    """A small CNN for ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 8 * 8, 10),
    )  # fmt: skip


def open_loader(config: dict[str, Any]) -> cl.DataLoader:
    """The loader that the configuration describes."""
    dataset = cl.RemoteDataset(
        config["urls"],
        seed=config["seed"],
        transform=decode,
        storage_options=config["storage_options"],
        cache_dir=config["cache_dir"],
        cache_size=config["cache_size"],
        tail="keep",
        shuffle_window=config["shuffle_window"],
    )
    return cl.DataLoader(dataset, batch_size=config["batch_size"], num_workers=2)


def main(config_path: str) -> None:
    """Train as the file says, from the saved position if there is one."""
    config = json.loads(Path(config_path).read_text())
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = open_loader(config)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    saved = Path(config["checkpoint"])
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(state, saved.with_suffix(".tmp"))
        saved.with_suffix(".tmp").replace(saved)

    with Path(config["log"]).open("a", buffering=1) as log:
        log.write(json.dumps({"position": loader.state_dict()}) + "\n")
        for epoch in range(loader.epoch, config["epochs"]):
            _train_epoch(epoch, loader, model, optimizer, log, save=save, save_every=config["save_every"])
            save()


def _train_epoch(
    epoch: int,
    loader: cl.DataLoader,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    log: TextIO,
    *,
    save: Callable[[], None],
    save_every: int,
) -> None:
    begin = time.perf_counter()
    for step, batch in enumerate(loader):
        logits = model(batch["image"])
        loss = nn.functional.cross_entropy(logits, batch["label"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        row = {
            "epoch": epoch,
            "keys": batch["key"],
            "read_bytes": int(batch["size_bytes"].sum()),
            "correct": int((logits.argmax(1) == batch["label"]).sum()),
            "fetch_seconds": loader.last_fetch_seconds,
            "elapsed_s": time.perf_counter() - begin,
        }
        log.write(json.dumps(row) + "\n")
        if save_every and (step + 1) % save_every == 0:
            save()


def list_epoch(config_path: str, epoch: int) -> None:
    """Print the keys of one whole, uninterrupted epoch, in order, as one JSON list."""
    loader = open_loader(json.loads(Path(config_path).read_text()))
    loader.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
    print(json.dumps([key for batch in loader for key in batch["key"]]))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        list_epoch(sys.argv[1], int(sys.argv[2]))
    else:
        main(sys.argv[1])
