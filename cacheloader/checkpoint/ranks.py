"""Agreement between the ranks of a job about its checkpoints, over groups of its own."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from cacheloader.errors import CacheloaderError, CheckpointError, ConfigError, SaveFailed
from cacheloader.world import detect

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Ranks:
    """All ranks of the job.

    Two gloo groups: one for decisions on the training thread, one for saves in the background, whose collectives would
    otherwise meet those of the training loop in another order on each rank. Making them is a collective itself.

    Args:
        timeout_s: Longest wait for another rank.

    Raises:
        ConfigError: Several ranks, and no process group yet.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.decisions: dist.ProcessGroup | None = None
        self.saving: dist.ProcessGroup | None = None
        self.is_distributed = dist.is_available() and dist.is_initialized()
        if self.is_distributed:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            deadline = timedelta(seconds=timeout_s)
            self.decisions = dist.new_group(backend="gloo", timeout=deadline)
            self.saving = dist.new_group(backend="gloo", timeout=deadline)
            return
        world = detect()
        self.rank, self.world_size = world.rank, world.world_size
        if world.world_size > 1:
            raise ConfigError(
                f"RANK and WORLD_SIZE say that there are {world.world_size} ranks, and they cannot talk to each other; "
                "call torch.distributed.init_process_group before making a Checkpointer"
            )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def hush(self) -> None:
        """What torch warns of at each save and restore of a single process is no trouble: it is the whole job."""
        if not self.is_distributed:
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled, )?unavailable or uninitialized")

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` returns on rank 0, on every rank; an error of it is raised on every rank."""
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer[0] = make()
            except Exception as error:  # noqa: BLE001  (raised below, here and on the others)
                answer[1] = error
        if self.is_distributed:
            answer = [answer]
            dist.broadcast_object_list(answer, src=0, group=self.decisions, device=torch.device("cpu"))
            answer = answer[0]
        if answer[1] is not None:
            raise answer[1]
        return answer[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank, in their order."""
        if not self.is_distributed:
            return [value]
        answers: list[Any] = [None] * self.world_size
        dist.all_gather_object(answers, value, group=self.decisions)
        return answers

    def together(self, what: str, act: Callable[[], T]) -> T:
        """Run ``act`` on every rank; if it fails on any, every rank raises.

        Where it failed the error is its own; elsewhere it is of the same kind, if that is one of cacheloader's.

        Args:
            what: Names the act in the error on the ranks where it did not fail.
            act: What to do.
        """
        own: Exception | None = None
        result: Any = None
        try:
            result = act()
        except Exception as error:  # noqa: BLE001  (raised below, after the others know)
            own = error
        kind: type[CacheloaderError] = type(own) if isinstance(own, ConfigError | SaveFailed) else CheckpointError
        told = self.gather((kind, "" if own is None else f"{type(own).__name__}: {own}"))
        if own is not None:
            raise own
        for rank, (kind, message) in enumerate(told):
            if message:
                raise kind(f"{what} failed on rank {rank}: {message}")
        return result  # type: ignore[no-any-return]

    def any(self, flag: bool) -> bool:  # noqa: FBT001
        """Whether ``flag`` is set on any rank."""
        if not self.is_distributed:
            return flag
        seen = torch.tensor([int(flag)])
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self.decisions)
        return bool(seen.item())

    def close(self) -> None:
        """Give the groups back; only after every rank has finished its last save."""
        for group in (self.decisions, self.saving):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self.decisions = self.saving = None
