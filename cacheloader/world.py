"""Which rank this process is, of how many."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from cacheloader.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Place of this process among those that train together.

    Attributes:
        rank: In ``[0, world_size)``.
        world_size: Number of ranks, 1 or more.
    """

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank} of world_size={self.world_size} is no rank; ranks count from 0 to world_size - 1"
            )


def detect(*, rank: int | None = None, world_size: int | None = None) -> World:
    """The world of this process: arguments, else torch.distributed, else RANK and WORLD_SIZE, else 0 of 1.

    Raises:
        ConfigError: Only one half is known, or it is no number: guessing the other would train on wrong samples.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank={rank} and world_size={world_size}: pass both or neither")
    if rank is not None and world_size is not None:
        return World(rank=rank, world_size=world_size)
    distributed = sys.modules.get("torch.distributed")  # never imported for its own sake: this room is torch-free
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return World(rank=distributed.get_rank(), world_size=distributed.get_world_size())
    texts = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if texts["RANK"] is None and texts["WORLD_SIZE"] is None:
        return World(rank=0, world_size=1)
    try:
        return World(rank=int(texts["RANK"] or ""), world_size=int(texts["WORLD_SIZE"] or ""))
    except ValueError as error:
        raise ConfigError(
            f"the environment has RANK={texts['RANK']!r} and WORLD_SIZE={texts['WORLD_SIZE']!r}; "
            "set both to numbers, or unset both"
        ) from error
