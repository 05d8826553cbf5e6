"""A stand-in for the daemon's ``Fetcher`` whose every call waits until a test says how it ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cacheloader_daemon.lease import ShardLease
from cacheloader_daemon.store import Survey

from cacheloader import fdpass

if TYPE_CHECKING:
    from cacheloader_daemon.shards import ShardSource


class ScriptedFetcher:
    """Calls by name and key, in ``calls``; ``end`` lets one of them return or raise."""

    drops_behind = False

    def __init__(self) -> None:
        self.calls: dict[tuple[str, bytes], asyncio.Future[Any]] = {}
        self.log: list[tuple[str, bytes]] = []
        self.promoted: list[bytes] = []
        self.origins: list[object] = []
        self.gone: set[bytes] = set()
        self.now = Survey(limit_bytes=2**60, overhead_bytes=0, takes_shards=True)

    def end(self, name: str, key: bytes, outcome: object) -> None:
        """Let the call return ``outcome``, or raise it if it is an exception."""
        call = self.calls.pop((name, key))
        if isinstance(outcome, BaseException):
            call.set_exception(outcome)
        else:
            call.set_result(outcome)

    def promote(self, key: bytes) -> None:
        self.promoted.append(key)

    async def into_store(self, source: ShardSource, *, is_demand: bool) -> int:
        self.origins.append(source.origin)
        return await self._call("demand" if is_demand else "prefetch", source.key)

    async def into_memory(self, source: ShardSource) -> ShardLease:
        return await self._call("memory", source.key)

    async def lease(self, key: bytes, *, source: str) -> ShardLease:
        return await self._call("lease", key)

    async def evict(self, key: bytes) -> None:
        await self._call("evict", key)

    leftover_bytes = 0

    def has(self, key: bytes) -> bool:
        return key not in self.gone

    async def survey(self) -> Survey:
        return self.now

    async def _call(self, name: str, key: bytes) -> Any:
        call = asyncio.get_running_loop().create_future()
        # Several leases of one shard may be asked for at once: the oldest keeps the plain name.
        number = 0
        unique = name
        while (unique, key) in self.calls:
            number += 1
            unique = f"{name} {number}"
        self.calls[unique, key] = call
        self.log.append((name, key))
        return await call


def memory_lease(*, num_samples: int = 10, source: str = "nvme") -> ShardLease:
    """A lease of a small shard in memory files."""
    index = num_samples.to_bytes(8, "little")
    return ShardLease(
        data_fd=fdpass.sealed_memory_file("data", b"shard"),
        index_fd=fdpass.sealed_memory_file("index", index),
        size_bytes=5,
        index_bytes=8,
        source=source,
        index_head=index,
    )
