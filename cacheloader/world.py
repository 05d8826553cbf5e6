"""Which rank this process is, of how many, and in which attempt of the job."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from cacheloader.errors import ConfigError

_AGREEMENT_TIMEOUT = timedelta(seconds=120)


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


def attempt_name(world: World) -> str:
    """A name for this launch of the job, the same on all its ranks and never used by an earlier launch.

    From CACHELOADER_ATTEMPT, else from rank 0 through torch.distributed's store (no collective), else, where one
    process is the whole world or plays all its ranks, from its own start.

    Raises:
        ConfigError: The ranks are processes that cannot talk to each other, or rank 0 says nothing.
    """
    given = os.environ.get("CACHELOADER_ATTEMPT")
    if given is not None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", given):
            raise ConfigError(
                f"CACHELOADER_ATTEMPT={given!r} becomes part of a file name; use 1 to 100 letters, digits and '._-'"
            )
        return given
    store = _store()
    if store is not None:
        return _agreed_name(store, world)
    if world.world_size > 1 and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"the {world.world_size} ranks have no process group through which to agree on a name for this attempt; "
            "call torch.distributed.init_process_group first, or set CACHELOADER_ATTEMPT to a new name at every launch"
        )
    return _own_name(os.getpid())


def _agreed_name(store: Any, world: World) -> str:
    # torchrun's agent keeps its store while it starts the workers again, and with it the name of the attempt before.
    key = f"cacheloader/attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{world.world_size}"
    if world.rank == 0:
        if not store.check([key]):
            store.set(key, _own_name(os.getpid()))
    else:
        try:
            store.wait([key], _AGREEMENT_TIMEOUT)
        except RuntimeError as error:
            raise ConfigError(
                f"rank {world.rank} waited {_AGREEMENT_TIMEOUT.seconds} s for rank 0 to name this attempt; "
                "record on all ranks or on none"
            ) from error
    name: str = store.get(key).decode()
    return name


def _store() -> Any:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


@cache
def _own_name(pid: int) -> str:
    moment = time.time_ns()
    start = time.strftime("%Y%m%dT%H%M%S", time.gmtime(moment // 10**9))
    return f"{start}.{moment % 10**9:09d}-{pid}"
