"""Transforms that tell which sample they got and what chance gave them for it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

Drawn = tuple[str, float, float, float, float]


def key_and_draws(sample: dict[str, Any], rng: np.random.Generator) -> Drawn:
    """Key, and one draw each of python's, numpy's, torch's and the argument's generator."""
    return sample["__key__"], random.random(), float(np.random.random()), float(torch.rand(())), float(rng.random())
