"""A small training job in one process, and ways to hurt its checkpoints."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import cacheloader as cl

if TYPE_CHECKING:
    from pathlib import Path


class Job:
    """Model with dropout, AdamW, a schedule, and data from the global generators: each of them has to be restored."""

    def __init__(self, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)

    def step(self) -> float:
        scale = random.random() + np.random.rand()
        loss = (self.model(torch.randn(5, 8)) * scale).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def checkpointer(self, url: Any, **options: Any) -> cl.Checkpointer:
        return cl.Checkpointer(url, model=self.model, optimizer=self.optimizer, schedule=self.schedule, **options)


def saved(folder: Path, *, steps: int, **options: Any) -> Job:
    """A job that has saved after each of some steps."""
    job = Job()
    with job.checkpointer(folder, **options) as checkpoints:
        checkpoints.restore_latest()
        for step in range(1, steps + 1):
            job.step()
            checkpoints.save(step)
    return job


def saves(folder: Path) -> list[Path]:
    """Folders of the saves, oldest first."""
    return sorted(path for path in folder.iterdir() if path.is_dir())


def flip_bit(path: Path, *, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path: Path, *, by: int = 1) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - by)
