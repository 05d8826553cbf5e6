"""Grants of the planner made good: a blob is opened and handed out, or found gone and asked for anew."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cacheloader.errors import CacheloaderError, DaemonError, DatasetError
from cacheloader_daemon.plan import events
from cacheloader_daemon.store import BlobLost, DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cacheloader_daemon.account import Account
    from cacheloader_daemon.bringing import Bringer
    from cacheloader_daemon.fetch import Fetcher
    from cacheloader_daemon.lease import ShardLease
    from cacheloader_daemon.plan import effects
    from cacheloader_daemon.sessions import Session, Wait

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Times that one request may find its blob gone from the disk before it is served past it."""


class Grants:
    """Opens blobs for those who were promised them.

    Args:
        fetcher: Opens a blob.
        bringer: Knows who may read what.
        account: Counts.
        sessions: Those that are open; their leases are counted here.
        tell: Takes an event.
        demand: Asks the planner anew.
        past_the_cache: Serves from memory.
        now_s: The loop's time.
    """

    def __init__(
        self,
        *,
        fetcher: Fetcher,
        bringer: Bringer,
        account: Account,
        sessions: Mapping[int, Session],
        tell: Callable[[events.Event], None],
        demand: Callable[[Wait], None],
        past_the_cache: Callable[[Wait], None],
        now_s: Callable[[], float],
    ) -> None:
        self._fetcher = fetcher
        self._bringer = bringer
        self._account = account
        self._sessions = sessions
        self._tell = tell
        self._demand = demand
        self._past_the_cache = past_the_cache
        self._now_s = now_s
        # Blobs that one grant found gone, while others of them may still be on their way.
        self._lost: set[bytes] = set()

    def fetched_anew(self, key: bytes) -> None:
        """What was lost is being brought again, and may be lost again."""
        self._lost.discard(key)

    def note_lost(self, key: bytes) -> bool:
        """A blob is gone; whether that is news."""
        if key in self._lost:
            return False
        self._lost.add(key)
        return True

    def forget(self) -> None:
        """No session is left."""
        self._lost.clear()

    async def grant(self, effect: effects.Grant, wait: Wait) -> None:
        """Open a blob for one who waits; the lease is counted already."""
        try:
            await self._bringer.require_right(wait)
            lease = await self._fetcher.lease(effect.key, source="nvme" if effect.hit else "origin")
        except BlobLost:
            self._replace_lost(wait)
        except CacheloaderError as error:
            if self._take_back(wait):
                wait.answer(error)
        except DiskTrouble as error:
            self._account.disk_failed(self._now_s())
            log.warning("blob %s cannot be opened: %s", effect.key.hex(), error)
            if self._take_back(wait):
                self._past_the_cache(wait)
        except Exception as error:
            # The outer edge of a task: who waits has to hear of it.
            log.exception("opening blob %s met a defect", effect.key.hex())
            if self._take_back(wait):
                wait.answer(DaemonError(f"the daemon met a defect ({error!r}); its log has the traceback"))
        else:
            if not self.hand_out(lease, wait):
                self._take_back(wait)

    def hand_out(self, lease: ShardLease, wait: Wait) -> bool:
        """Give a lease to who waits; ``False``, and closed, if the session is gone or was promised another shard."""
        state = self._sessions.get(wait.session)
        if state is None:
            lease.close()
            return False
        try:
            state.dataset.check_count(wait.shard, lease.index_head)
        except DatasetError as error:
            lease.close()
            wait.answer(error)
            return False
        wait.answer(lease)
        return True

    def _take_back(self, wait: Wait) -> bool:
        """Undo a grant that cannot be honoured; whether its session is still there."""
        state = self._sessions.get(wait.session)
        if state is None:
            return False
        state.leases[wait.shard] -= 1
        self._tell(events.Released(session=wait.session, shard=wait.shard))
        return True

    def _replace_lost(self, wait: Wait) -> None:
        """The blob behind a grant is gone or damaged: ask anew."""
        if wait.session not in self._sessions:
            return  # its lease ended with it, and the planner may have let the blob go since
        # Told before the lease ends: a blob without leases that nobody knows to be gone may be chosen for eviction, and
        # then its end would be told twice. Others may find the same blob gone; it is dropped once.
        if self.note_lost(wait.key):
            self._tell(events.Dropped(key=wait.key))
        self._take_back(wait)
        wait.attempts += 1
        if wait.attempts < MAX_ATTEMPTS:
            self._demand(wait)
        else:
            self._past_the_cache(wait)
