"""The shards that a helper process holds in memory: those that are leased, and a bounded number of others."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from cacheloader.errors import CacheloaderError
from cacheloader.origin.slots import Urgency

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable

_Key = TypeVar("_Key", bound="Hashable")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInMemory:
    """A whole shard and its sample index, in sealed memory files.

    Attributes:
        data_fd: The shard's bytes.
        index_fd: The index.
        size_bytes: Length of the shard.
        index_bytes: Length of the index.
    """

    data_fd: int
    index_fd: int
    size_bytes: int
    index_bytes: int

    def close(self) -> None:
        """Close both files; the memory is free when the last lease is."""
        os.close(self.data_fd)
        os.close(self.index_fd)


class ShardMemory(Generic[_Key]):
    """Fetches each shard once, however many wait for it, and keeps what fits.

    A leased shard takes memory whether it is kept here or not, so it does not count against the budget. What is not
    leased is dropped when it was used longest ago, shards that are needed soon last of all.

    Args:
        fetch: Brings a shard; its urgency is raised when somebody begins to wait for it.
        size_bytes_of: Length of a shard.
        budget_bytes: What the shards that are not leased may take, fetches ahead of need included and their indexes,
            which are small, not.
    """

    def __init__(
        self,
        fetch: Callable[[_Key, Urgency], Awaitable[ShardInMemory]],
        *,
        size_bytes_of: Callable[[_Key], int],
        budget_bytes: int,
    ) -> None:
        self._fetch = fetch
        self._size_bytes_of = size_bytes_of
        self._budget_bytes = budget_bytes
        self._held: OrderedDict[_Key, ShardInMemory] = OrderedDict()  # least recently used first
        self._leases: Counter[_Key] = Counter()
        self._fetches: dict[_Key, tuple[asyncio.Task[ShardInMemory], Urgency]] = {}
        self._soon: tuple[_Key, ...] = ()

    @property
    def idle_bytes(self) -> int:
        """What counts against the budget: shards that nobody has leased, and fetches that nobody waits for."""
        held = sum(data.size_bytes for shard, data in self._held.items() if not self._leases[shard])
        fetching = sum(
            self._size_bytes_of(shard) for shard, (_, urgency) in self._fetches.items() if not urgency.demanded
        )
        return held + fetching

    def __contains__(self, shard: _Key) -> bool:
        """Whether the shard is here or on its way."""
        return shard in self._held or shard in self._fetches

    def is_leased(self, shard: _Key) -> bool:
        """Whether somebody holds a lease of the shard, or waits for one."""
        return self._leases[shard] > 0

    async def acquire(self, shard: _Key) -> tuple[ShardInMemory, bool]:
        """A shard, leased until ``release``.

        Returns:
            The shard, which stays open for as long as it is leased, and whether it was here already.

        Raises:
            CacheloaderError: It cannot be fetched.
        """
        was_here = shard in self._held
        self._leases[shard] += 1  # before it is here, so that it is not dropped in the moment that it comes
        try:
            if not was_here:
                # One that waits may be cancelled; the fetch belongs to all.
                await asyncio.shield(self._start(shard, demanded=True))
        except BaseException:
            self.release(shard)
            raise
        self._held.move_to_end(shard)
        return self._held[shard], was_here

    def release(self, shard: _Key) -> None:
        """Give back one lease of a shard; one too many does nothing."""
        if self._leases[shard] > 0:
            self._leases[shard] -= 1
            if not self._leases[shard]:
                del self._leases[shard]
            self._trim(0)

    def prepare(self, soon: Iterable[_Key]) -> None:
        """Fetch ahead, in the order of need, as much of ``soon`` as fits into the budget, and nothing else any more."""
        self._soon = tuple(soon)
        self._end_unwanted()
        for shard in self._soon:
            if shard in self:
                continue
            self._trim(self._size_bytes_of(shard))
            if self.idle_bytes + self._size_bytes_of(shard) > self._budget_bytes:
                return
            self._start(shard, demanded=False)

    def drop(self, unwanted: Callable[[_Key], bool]) -> None:
        """Forget what nobody will ask for again; what is leased stays until it is released."""
        self._soon = tuple(shard for shard in self._soon if not unwanted(shard))
        self._end_unwanted()
        for shard in [shard for shard in self._held if unwanted(shard) and not self._leases[shard]]:
            self._held.pop(shard).close()

    async def aclose(self) -> None:
        """End all fetches and close all files."""
        tasks = [task for task, _ in self._fetches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._held:
            self._held.popitem()[1].close()

    def _start(self, shard: _Key, *, demanded: bool) -> asyncio.Task[ShardInMemory]:
        if shard not in self._fetches:
            urgency = Urgency(demanded=demanded)
            task = asyncio.create_task(self._bring(shard, urgency))
            task.add_done_callback(_look_at_error)
            self._fetches[shard] = (task, urgency)
        task, urgency = self._fetches[shard]
        urgency.demanded = urgency.demanded or demanded
        return task

    def _end_unwanted(self) -> None:
        """End the fetches that nobody waits for and nobody will need soon: a store may be silent for minutes."""
        for shard, (task, _) in list(self._fetches.items()):
            if not self._leases[shard] and shard not in self._soon:
                # Not left for the task to do: who asks for the shard before it has ended starts another fetch.
                del self._fetches[shard]
                task.cancel()

    async def _bring(self, shard: _Key, urgency: Urgency) -> ShardInMemory:
        try:
            data = await self._fetch(shard, urgency)
        finally:
            if shard in self._fetches and self._fetches[shard][0] is asyncio.current_task():
                del self._fetches[shard]
        self._held[shard] = data
        self._trim(0)
        return data

    def _trim(self, more_bytes: int) -> None:
        """Drop what is idle until ``more_bytes`` more fit, but nothing that is needed soon to make room."""
        excess = self.idle_bytes + more_bytes - self._budget_bytes
        idle = [shard for shard in self._held if not self._leases[shard]]
        later = [shard for shard in idle if shard not in self._soon]
        sooner = [shard for shard in reversed(self._soon) if shard in idle] if not more_bytes else []
        for shard in [*later, *sooner]:
            if excess <= 0:
                return
            data = self._held.pop(shard)
            excess -= data.size_bytes
            data.close()


def _look_at_error(task: asyncio.Task[ShardInMemory]) -> None:
    # A fetch ahead of need may fail unseen: whoever needs the shard starts another and gets its error.
    if not task.cancelled() and not isinstance(task.exception(), CacheloaderError | None):
        task.get_loop().call_exception_handler({"message": "a fetch failed unexpectedly", "task": task})
