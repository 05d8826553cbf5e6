"""The fetches that the planner has ordered, as tasks: each ends in one event, also where nobody is left to want it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from cacheloader.errors import CacheloaderError, DaemonError
from cacheloader_daemon.plan import events
from cacheloader_daemon.store import DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from cacheloader_daemon.account import Account
    from cacheloader_daemon.bringing import Bringer
    from cacheloader_daemon.fetch import Fetcher
    from cacheloader_daemon.plan.machine import Planner
    from cacheloader_daemon.sessions import Session, Wait, Waits
    from cacheloader_daemon.shards import ShardSource

log = logging.getLogger(__name__)


class Fetches:
    """Runs fetches into the store.

    Args:
        planner: Asked whether anybody still wants a shard.
        fetcher: Brings a shard.
        bringer: Chooses with whose rights.
        account: Counts.
        sessions: Those that are open.
        waits: Who waits for what.
        spawn: Runs a task.
        tell: Takes the event in which a fetch ends.
    """

    def __init__(
        self,
        *,
        planner: Planner,
        fetcher: Fetcher,
        bringer: Bringer,
        account: Account,
        sessions: Mapping[int, Session],
        waits: Waits,
        spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
        tell: Callable[[events.Event], None],
    ) -> None:
        self._planner = planner
        self._fetcher = fetcher
        self._bringer = bringer
        self._account = account
        self._sessions = sessions
        self._waits = waits
        self._spawn = spawn
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[bytes, asyncio.Task[None]] = {}
        self._last_errors: dict[bytes, CacheloaderError] = {}
        self._is_stopping = False

    def start(self, key: bytes, *, is_demand: bool) -> None:
        """Bring a shard; the planner has reserved its space."""
        self._spawn(self._fetch(key, is_demand=is_demand))

    def stop(self) -> None:
        """The daemon leaves: what is cancelled from now on is not to be told, nor begun again."""
        self._is_stopping = True

    def end_unwanted(self) -> None:
        """Give up the fetches that nobody waits for and no plan needs any more.

        A store that answers nothing would else keep their space reserved for minutes, for which good blobs are evicted.
        """
        for key, task in list(self._under_way.items()):
            if self._planner.is_unwanted(key):
                task.cancel()

    def refusal(self, wait: Wait) -> CacheloaderError:
        """Why the shard that was waited for cannot be had."""
        error = self._last_errors.get(wait.key)
        if error is not None:
            return error
        uri = self._sessions[wait.session].dataset.manifest.uri(wait.shard)
        return DaemonError(f"{uri} could not be fetched; the daemon's log says why", uri=uri)

    async def _fetch(self, key: bytes, *, is_demand: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        # Noted here and not where the task is made: one that is cancelled before it begins would never tell its end.
        self._under_way[key] = task
        event: events.Event | None
        try:
            event = await self._brought(key, is_demand=is_demand)
        except asyncio.CancelledError:
            if self._is_stopping:
                raise
            task.uncancel()
            # Somebody may have come to want it while its partial file was removed.
            event = events.FetchFailed(key=key, disk=False) if self._planner.is_unwanted(key) else None
        finally:
            del self._under_way[key]
        if event is None:
            self.start(key, is_demand=bool(self._waits.of(key)))
            return
        self._tell(event)
        self._last_errors.pop(key, None)

    async def _brought(self, key: bytes, *, is_demand: bool) -> events.Event:
        started_s = self._loop.time()

        def into_store(source: ShardSource) -> Awaitable[int]:
            # Somebody may have come to wait for it since it was ordered, or since the last try.
            return self._fetcher.into_store(source, is_demand=is_demand or bool(self._waits.of(key)))

        try:
            source, used_bytes = await self._bringer.bring(key, lambda: self._waits.of(key), into_store)
        except DiskTrouble:
            self._account.disk_failed(self._loop.time())
            return events.FetchFailed(key=key, disk=True)
        except CacheloaderError as error:
            self._last_errors[key] = error
            return events.FetchFailed(key=key, disk=False)
        self._account.shard_fetch_s.add(self._loop.time() - started_s)
        self._account.remote_read_bytes["demand" if is_demand else "prefetch"] += source.info.size_bytes
        return events.FetchFinished(key=key, used_bytes=used_bytes)
