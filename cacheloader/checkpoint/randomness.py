"""The random states of one process: python, numpy, torch, and the accelerator."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """All states as plain types; nothing is drawn."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    states = {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(states: dict[str, Any]) -> None:
    """Set what ``capture`` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def derive(states: dict[str, Any], *, rank: int, world_size: int) -> None:
    """Seed this process for a world in which no saved state fits: the same each time, and different on every rank.

    Args:
        states: What ``capture`` returned on rank 0.
        rank: Of this process.
        world_size: Number of ranks now.
    """
    digest = hashlib.blake2b(states["torch"].numpy().tobytes(), digest_size=8)
    digest.update(repr((states["python"], states["numpy"], rank, world_size)).encode())
    seed = int.from_bytes(digest.digest(), "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
