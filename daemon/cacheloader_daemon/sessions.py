"""Who reads what, and who waits for it: the runtime's own books."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.errors import CacheloaderError
    from cacheloader_daemon.lease import ShardLease
    from cacheloader_daemon.shards import Dataset
    from cacheloader_daemon.tenants import Visitor

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One reader of one data set.

    Attributes:
        dataset: What it reads.
        visitor: Who reads; ``None`` for the daemon's own user.
        leases: By shard, leases that the planner counts.
    """

    dataset: Dataset
    visitor: Visitor | None = None
    leases: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True, eq=False)
class Wait:
    """One request for a shard.

    Attributes:
        session: Whose.
        shard: Number in the session's data set.
        key: The same shard's identity on this node.
        deliver: Takes the answer, once.
        attempts: Times that its blob was found gone.
    """

    session: int
    shard: int
    key: bytes
    deliver: Callable[[ShardLease | CacheloaderError], None]
    attempts: int = 0

    def answer(self, outcome: ShardLease | CacheloaderError) -> None:
        """Deliver; a defect met on the way is not the others'."""
        try:
            self.deliver(outcome)
        except Exception:
            log.exception("an answer met a defect")


class Waits:
    """All requests that the planner has not answered, by number and by shard."""

    def __init__(self) -> None:
        self._waits: dict[tuple[int, int], Wait] = {}
        self._by_key: defaultdict[bytes, dict[tuple[int, int], Wait]] = defaultdict(dict)

    def add(self, request: int, wait: Wait) -> None:
        """``wait`` begins."""
        name = wait.session, request
        self._waits[name] = self._by_key[wait.key][name] = wait

    def take(self, session: int, request: int) -> Wait | None:
        """A request is answered; ``None`` if its session is gone."""
        wait = self._waits.pop((session, request), None)
        if wait is not None:
            others = self._by_key[wait.key]
            del others[session, request]
            if not others:
                del self._by_key[wait.key]
        return wait

    def end(self, session: int) -> None:
        """Nobody of ``session`` waits any more."""
        for name in [name for name in self._waits if name[0] == session]:
            self.take(*name)

    def of(self, key: bytes) -> list[Wait]:
        """Who waits for a shard, the longest first."""
        return list(self._by_key[key].values()) if key in self._by_key else []

    def count(self) -> Counter[int]:
        """Requests by session."""
        return Counter(session for session, _ in self._waits)
