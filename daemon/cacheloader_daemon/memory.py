"""Shards served past the cache, from memory: one copy for all who wait for it, and not more bytes than allowed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheloader.errors import CacheloaderError, DaemonError
from cacheloader.quantity import format_size
from cacheloader_daemon.store import DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from cacheloader_daemon.account import Account
    from cacheloader_daemon.bringing import Bringer
    from cacheloader_daemon.fetch import Fetcher
    from cacheloader_daemon.lease import ShardLease
    from cacheloader_daemon.sessions import Session, Wait
    from cacheloader_daemon.shards import ShardSource


@dataclass(slots=True, kw_only=True, eq=False)
class _Copy:
    """One shard in memory; its bytes count until the last lease of it is given back."""

    size_bytes: int
    holders: int = 0


class MemoryServing:
    """Brings shards into memory and keeps account of who holds them.

    A client that gives a lease back and keeps the descriptor keeps the memory too; that is between it and the kernel.

    Args:
        max_bytes: Bytes that may be brought or held at once.
        sessions: Those that are open.
        fetcher: Brings a shard into memory.
        bringer: Chooses with whose rights.
        account: Counts bytes.
        spawn: Runs a task.
        hand_out: Gives a lease to one who waits; whether it was his.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        sessions: Mapping[int, Session],
        fetcher: Fetcher,
        bringer: Bringer,
        account: Account,
        spawn: Callable[[Coroutine[None, None, None]], object],
        hand_out: Callable[[ShardLease, Wait], bool],
    ) -> None:
        self._max_bytes = max_bytes
        self._sessions = sessions
        self._fetcher = fetcher
        self._bringer = bringer
        self._account = account
        self._spawn = spawn
        self._hand_out = hand_out
        self._waits: dict[bytes, list[Wait]] = {}
        self._held: defaultdict[int, defaultdict[int, list[_Copy]]] = defaultdict(lambda: defaultdict(list))
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of shards on their way into memory or held there."""
        return self._used_bytes

    def serve(self, wait: Wait) -> None:
        """Bring the shard, or join those for whom it is being brought."""
        waiting = self._waits.get(wait.key)
        if waiting is not None:
            waiting.append(wait)
            return
        self._waits[wait.key] = [wait]
        self._spawn(self._fetch(wait.key))

    def release(self, session: int, shard: int) -> bool:
        """The session gives back a lease of a shard in memory; ``False`` if it has none."""
        copies = self._held[session][shard] if session in self._held else []
        if not copies:
            return False
        self._end(copies.pop())
        return True

    def close(self, session: int) -> None:
        """All its leases of shards in memory end."""
        for copies in self._held.pop(session, {}).values():
            for copy in copies:
                self._end(copy)

    def num_leases(self, session: int) -> int:
        """Leases of shards in memory that the session holds."""
        return sum(map(len, self._held[session].values())) if session in self._held else 0

    def _end(self, copy: _Copy) -> None:
        copy.holders -= 1
        if not copy.holders:
            self._used_bytes -= copy.size_bytes

    async def _fetch(self, key: bytes) -> None:
        lease: ShardLease | None = None
        copy: _Copy | None = None
        error: CacheloaderError = DaemonError("the daemon is leaving")

        def into_memory(source: ShardSource) -> Coroutine[None, None, ShardLease]:
            nonlocal copy
            if copy is None:  # else denied before, and tried with other rights
                copy = self._reserve(source)
            return self._fetcher.into_memory(source)

        try:
            source, lease = await self._bringer.bring(key, lambda: list(self._waits[key]), into_memory)
            self._account.remote_read_bytes["bypass"] += source.info.size_bytes
        except CacheloaderError as failure:
            error = failure
        except DiskTrouble as failure:
            error = DaemonError(f"the shard could be brought neither to disk nor to memory: {failure}")
        finally:
            waiting = self._waits.pop(key)
            if copy is not None and lease is None:
                self._used_bytes -= copy.size_bytes
        if lease is None or copy is None:
            for wait in waiting:
                if wait.session in self._sessions:
                    wait.answer(error)
            return
        copy.holders = 1  # ourselves
        try:
            for wait in waiting:
                if await self._may_have(wait):
                    self._share(lease, copy, wait)
        finally:
            lease.close()
            self._end(copy)

    async def _may_have(self, wait: Wait) -> bool:
        try:
            await self._bringer.require_right(wait)
        except CacheloaderError as error:
            if wait.session in self._sessions:
                wait.answer(error)
            return False
        return wait.session in self._sessions

    def _reserve(self, source: ShardSource) -> _Copy:
        size_bytes = source.info.size_bytes
        if self._used_bytes + size_bytes > self._max_bytes:
            raise DaemonError(
                f"{source.info.uri} ({format_size(size_bytes)}) cannot be cached now, and "
                f"{format_size(self._used_bytes)} of {format_size(self._max_bytes)} (max_memory_size) are in use for "
                "shards past the cache; see why the cache cannot take it (cacheloader status), or allow more memory",
                uri=source.info.uri,
            )
        self._used_bytes += size_bytes
        return _Copy(size_bytes=size_bytes)

    def _share(self, lease: ShardLease, copy: _Copy, wait: Wait) -> None:
        """Give one of those who wait a lease of his own, whatever becomes of the others."""
        try:
            own = lease.duplicate()
        except OSError as failure:
            wait.answer(DaemonError(f"the daemon has no descriptor left for a shard ({failure}); raise its limit"))
            return
        # Before he has it: on the way, his connection may turn out to be gone.
        copy.holders += 1
        self._held[wait.session][wait.shard].append(copy)
        if not self._hand_out(own, wait):
            self.release(wait.session, wait.shard)
