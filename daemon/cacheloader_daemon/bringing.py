"""With whose rights a shard is brought: those of who waits for it, and others' only where these are denied.

On a shared daemon nobody gets a shard that he has not been seen to be able to read, whoever brought it.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, TypeVar

from cacheloader.errors import CacheloaderError, CorruptShard, DaemonError, OriginDenied
from cacheloader_daemon.store import DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from cacheloader.origin.base import Origin
    from cacheloader_daemon.account import Account
    from cacheloader_daemon.proofs import Proofs
    from cacheloader_daemon.sessions import Session, Wait
    from cacheloader_daemon.shards import ShardSource

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Bringer:
    """Chooses the session whose origin is asked, and explains failures.

    Args:
        sessions: Those that are open, in the order in which they were opened.
        account: Counts failures.
        proofs: Who may read what; ``None`` where all clients have the same rights.
    """

    def __init__(self, sessions: Mapping[int, Session], account: Account, *, proofs: Proofs | None = None) -> None:
        self._sessions = sessions
        self._account = account
        self._proofs = proofs

    async def require_right(self, wait: Wait) -> None:
        """Return if the shard that is there may be handed to the session that waits.

        Raises:
            CacheloaderError: Its credentials do not read it, or that cannot be found out.
        """
        session = self._sessions.get(wait.session)
        source = None if session is None else session.dataset.source(wait.key)
        if self._proofs is not None and source is not None:
            await self._proofs.require(source)

    async def bring(
        self, key: bytes, waiting: Callable[[], Iterable[Wait]], call: Callable[[ShardSource], Awaitable[_T]]
    ) -> tuple[ShardSource, _T]:
        """What ``call`` returns for the first source that is not denied, and that source.

        Args:
            key: The shard.
            waiting: Tells who waits for it now, the longest first.
            call: Brings it.

        Raises:
            CacheloaderError: No source brought it. Defects are logged and become this too.
            DiskTrouble: As ``call`` raises it.
        """
        denied: OriginDenied | None = None
        tried: list[Origin] = []
        was_damaged = False
        while True:
            # Looked up anew each time: sessions come and go meanwhile.
            sources = self._sources(key, waiting())
            source = next((source for source in sources if not any(source.origin is one for one in tried)), None)
            if source is None:
                raise denied or DaemonError("the sessions that wanted the shard have ended")
            try:
                result = await call(source)
            except DiskTrouble as error:
                log.warning("%s is not cached: %s", source.info.uri, error)
                raise
            except OriginDenied as error:
                # Another session may have the rights, or the fresh credentials, that this one lacks.
                self._note(error, source)
                tried.append(source.origin)
                denied = denied or error
            except CorruptShard as error:
                self._note(error, source)
                if was_damaged:
                    raise
                was_damaged = True  # perhaps on its way here
            except CacheloaderError as error:
                self._note(error, source)
                raise
            except Exception as error:
                # The outer edge of a task: whatever happened, those who wait for the shard have to hear of it.
                log.exception("fetching %s met a defect", source.info.uri)
                defect = DaemonError(
                    f"{source.info.uri} met a defect of the daemon ({error!r}); its log has the traceback",
                    uri=source.info.uri,
                )
                self._account.fetch_failures[type(defect).__name__] += 1
                raise defect from error
            else:
                if self._proofs is not None:
                    self._proofs.note(source)
                return source, result

    def _sources(self, key: bytes, waiting: Iterable[Wait]) -> Iterator[ShardSource]:
        """Of those who wait, then of the others, the newest first: its credentials live the longest.

        Another user's credentials are never used for those who wait.
        """
        first = [self._sessions[wait.session] for wait in waiting if wait.session in self._sessions]
        users = {session.visitor for session in first}
        others = [
            session
            for session in reversed(list(self._sessions.values()))
            if self._proofs is None or not first or session.visitor in users
        ]
        for session in itertools.chain(first, others):
            source = session.dataset.source(key)
            if source is not None:
                yield source

    def _note(self, error: CacheloaderError, source: ShardSource) -> None:
        log.warning("%s could not be fetched: %s", source.info.uri, error)
        self._account.fetch_failures[type(error).__name__] += 1
