"""Who has shown that he may read a shard. What one user's rights brought is not another's to read.

A shard in the cache is handed to a client of a shared daemon once one byte of exactly this version was read with the
client's own credentials: what a listing shows is no right to read. A proof holds for an hour, and as long as it is
remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from cacheloader.keys import ByteRange
from cacheloader.origin.transfer import with_retries

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.origin.base import Origin
    from cacheloader_daemon.shards import ShardSource

PROOF_S = 3600.0
"""A right that was taken away at the store is gone here after this time."""

MAX_PROOFS = 2**18
"""Of all credentials together; some 30 MB. Above it all are forgotten, and cost one small request each again."""


class Proofs:
    """What was read with which credentials.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s = clock()
        self._keys: WeakKeyDictionary[Origin, set[bytes]] = WeakKeyDictionary()

    def note(self, source: ShardSource) -> None:
        """The shard was just read from ``source``."""
        self._forget_old()
        self._keys.setdefault(source.origin, set()).add(source.key)

    async def require(self, source: ShardSource) -> None:
        """Return if the shard may be read from ``source``; asks the store if that is not known.

        Raises:
            OriginError: It may not, or the store does not answer.
        """
        self._forget_old()
        if source.key in self._keys.get(source.origin, ()):
            return
        info = source.info
        first = ByteRange(start=0, stop=min(1, info.size_bytes))
        await with_retries(
            lambda: source.origin.read_range(info.uri, first, version=info.version),
            action="asking for the right to read",
            uri=info.uri,
        )
        self.note(source)

    def _forget_old(self) -> None:
        now_s = self._clock()
        if now_s - self._since_s > PROOF_S or sum(map(len, self._keys.values())) >= MAX_PROOFS:
            self._since_s = now_s
            self._keys.clear()
