"""cacheloader: shards from object storage, cached once per node, read in an exactly resumable order by PyTorch.

Names are imported on first use, so that the node daemon, which shares some rooms of this package, never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheloader import errors as errors
    from cacheloader import goodput as goodput
    from cacheloader.checkpoint.checkpointer import Checkpointer as Checkpointer
    from cacheloader.dataset import RemoteDataset as RemoteDataset
    from cacheloader.delivery import SKIP as SKIP
    from cacheloader.loader import DataLoader as DataLoader
    from cacheloader.mixture import Mixture as Mixture
    from cacheloader.order.mixture_schedule import WeightsFrom as WeightsFrom

__version__ = "0.1.0"

_ROOMS = {
    "SKIP": "cacheloader.delivery",
    "Checkpointer": "cacheloader.checkpoint.checkpointer",
    "DataLoader": "cacheloader.loader",
    "Mixture": "cacheloader.mixture",
    "RemoteDataset": "cacheloader.dataset",
    "WeightsFrom": "cacheloader.order.mixture_schedule",
}

__all__ = [
    "SKIP",
    "Checkpointer",
    "DataLoader",
    "Mixture",
    "RemoteDataset",
    "WeightsFrom",
    "__version__",
    "errors",
    "goodput",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(import_module(_ROOMS[name]), name)
    if name in ("errors", "goodput"):
        return import_module(f"cacheloader.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
