"""Which blob to give up: without a plan the one used longest ago, then the one whose next use is farthest away.

Where several readers need a shard, the nearest use counts. Blobs that are to stay (``retention``) are given up last,
and only for somebody who waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cacheloader_daemon.plan.accesses import NEVER
from cacheloader_daemon.plan.horizon import INFINITE
from cacheloader_daemon.plan.readers import LazyHeap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from cacheloader_daemon.plan.catalog import Catalog
    from cacheloader_daemon.plan.horizon import Horizon, NextUse
    from cacheloader_daemon.plan.readers import Reader
    from cacheloader_daemon.plan.shares import Claim

MARGIN = 1 / 8
"""How much later, in proportion, a victim has to be needed: measured rates waver by some percent, and two sessions
must not take turns in evicting each other's next shard."""


def may_replace(*, victim_s: float, incoming_s: float) -> bool:
    """Whether a blob needed in ``victim_s`` seconds may make room for one needed in ``incoming_s`` (do no harm)."""
    return victim_s > incoming_s * (1 + MARGIN)


class Victim(msgspec.Struct, frozen=True):
    """A blob that could be given up.

    Attributes:
        key: The blob.
        seconds: Time until its next use, infinite if no plan names it.
    """

    key: bytes
    seconds: float


class VictimOrder:
    """Every unleased resident, in the order in which they are given up.

    A key is listed in one heap: that of a reader who needs it again, or the unplanned one. The time by which a
    reader's heap sorts is an upper bound of the time that counts, since another reader may need the key sooner; so it
    is compared when a key comes to the top, and the key is then listed with that other reader. Nothing has to be
    sorted again when sessions advance: within one plan the order never changes, except for a shard whose access is
    over, and that one is listed anew (``passed``).

    Args:
        horizon: The plans.
        used: When a key was used last, as a number that grows.
    """

    def __init__(self, horizon: Horizon, used: Callable[[bytes], int]) -> None:
        self._horizon = horizon
        self._used = used
        self._unplanned = LazyHeap()
        self._home: dict[bytes, Reader | None] = {}

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, key: object) -> bool:
        return key in self._home

    def add(self, key: bytes, now_s: float) -> None:
        """List a key, or list it anew."""
        self.discard(key)
        self._place(key, self._horizon.next_use(key, now_s))

    def discard(self, key: bytes) -> None:
        """The key is leased or gone."""
        if key not in self._home:
            return
        home = self._home.pop(key)
        if home is None:
            self._unplanned.discard(key)
        else:
            home.victims.discard(key)
            home.kept.discard(key)

    def passed(self, key: bytes, reader: Reader, now_s: float) -> None:
        """``reader`` has left an access of ``key`` behind."""
        if self._home.get(key) is reader:
            self.add(key, now_s)

    def relist(self, keys: Iterable[bytes], now_s: float) -> None:
        """Whether these are to stay has changed."""
        for key in keys:
            if self._home.get(key) is not None:
                self.add(key, now_s)

    def followed(self, reader: Reader, former: Reader | None) -> None:
        """A session follows another plan: ``reader`` instead of ``former``."""
        # The former reader's heap is thrown away as it is.
        keys = [*former.victims, *former.kept] if former is not None else []
        companions = reader.session.catalog.readers[reader.table.digest]
        if len(companions) == 1:
            # What nobody needed so far. Companions would have taken it when they began to follow this plan.
            unplanned = [key for key in self._horizon.coming(reader) if key in self._unplanned]
            for key in unplanned:
                self._unplanned.discard(key)
            keys += unplanned
        self._place_all(keys, [reader, *self._horizon.slowest_readers()])

    def left(self, former: Reader) -> None:
        """A session follows no plan any more; the horizon does not know ``former`` by now."""
        companions = former.session.catalog.readers.get(former.table.digest, [])
        self._place_all([*former.victims, *former.kept], [*companions[:1], *self._horizon.slowest_readers()])

    def farthest(self, now_s: float) -> Victim | None:
        """The first to be given up; it stays listed."""
        return self.farthest_free(now_s) or self.farthest_kept(now_s)

    def farthest_free(self, now_s: float, allowed: Callable[[bytes], bool] | None = None) -> Victim | None:
        """The first to be given up of those that are not to stay, and that are ``allowed``."""
        while (top := self._unplanned.top(allowed)) is not None:
            use = self._horizon.next_use(top[1], now_s)
            if use.reader is None:
                return Victim(top[1], INFINITE)
            self._move(top[1], use)
        return self._farthest(lambda reader: reader.victims, now_s, allowed)

    def farthest_kept(self, now_s: float, allowed: Callable[[bytes], bool] | None = None) -> Victim | None:
        """The first to be given up of those that are to stay, and that are ``allowed``."""
        return self._farthest(lambda reader: reader.kept, now_s, allowed)

    def _farthest(
        self, heap: Callable[[Reader], LazyHeap], now_s: float, allowed: Callable[[bytes], bool] | None
    ) -> Victim | None:
        while True:
            farthest, bound_s, home = b"", -1.0, None
            for reader in self._horizon.readers:
                planned = heap(reader).top(allowed)
                if planned is not None:
                    seconds = self._horizon.seconds_until(reader, -planned[0], now_s)
                    if seconds > bound_s:
                        farthest, bound_s, home = planned[1], seconds, reader
            if home is None:
                return None
            use = self._horizon.next_use(farthest, now_s)
            # Rates of two readers of one plan differ a little; that is no reason to move their keys to and fro.
            if use.reader is home or use.seconds * (1 + MARGIN) >= bound_s:
                return Victim(farthest, use.seconds)
            self._move(farthest, use)

    def choose(
        self,
        need_bytes: int,
        *,
        incoming_s: float | None,
        now_s: float,
        size_bytes: Callable[[bytes], int],
        is_ahead: Callable[[bytes], bool],
        claim: Claim | None = None,
    ) -> list[Victim] | None:
        """Victims, no longer listed, whose sizes add up to ``need_bytes``; ``None`` if that would do harm.

        Args:
            need_bytes: What is missing.
            incoming_s: Time until the incoming shard is needed, ``None`` if somebody waits for it: then blobs that are
                to stay may go as well.
            now_s: The present.
            size_bytes: Size of a listed key.
            is_ahead: Whether a listed key was fetched ahead and is not used yet.
            claim: Whose blobs may go, where owners are told apart.
        """
        allowed, by_right = (None, False) if claim is None else (claim.allows, claim.by_right)
        chosen: list[Victim] = []
        while need_bytes > 0:
            victim = self.farthest_free(now_s, allowed)
            if incoming_s is None and (victim is None or is_ahead(victim.key)):
                # To take the next shards of all from the window would only move the wait.
                kept = self.farthest_kept(now_s, allowed)
                if victim is None or (kept is not None and kept.seconds > victim.seconds):
                    victim = kept
            if victim is None or not (by_right or may_replace(victim_s=victim.seconds, incoming_s=incoming_s or 0.0)):
                for spared in chosen:
                    self.add(spared.key, now_s)
                return None
            self.discard(victim.key)
            chosen.append(victim)
            if claim is not None:
                claim.take(victim.key)
            need_bytes -= size_bytes(victim.key)
        return chosen

    def _move(self, key: bytes, use: NextUse) -> None:
        self.discard(key)
        self._place(key, use)

    def _place(self, key: bytes, use: NextUse) -> None:
        self._home[key] = use.reader
        if use.reader is None:
            self._unplanned.put(key, self._used(key))
        else:
            (use.reader.kept if self._horizon.is_kept(key) else use.reader.victims).put(key, -use.first_clock)

    def _place_all(self, keys: list[bytes], readers: Iterable[Reader]) -> None:
        """List many keys anew, each with the first of ``readers`` that needs it: who needs it first is found out later.

        Args:
            keys: Keys that are in no heap that is still in use.
            readers: Those that may need them.
        """
        left = np.arange(len(keys))
        places: dict[Catalog, NDArray[np.int64]] = {}
        for reader in readers:
            if not len(left):
                return
            catalog = reader.session.catalog
            if catalog not in places:
                places[catalog] = catalog.places(keys)
            at = places[catalog][left]
            firsts = np.full(len(left), NEVER, dtype=np.int64)
            firsts[at >= 0] = reader.table.next_firsts(at[at >= 0], reader.session.clock)
            needed = firsts != NEVER
            kept = catalog.kept[at] & needed
            for part, heap in ((needed & ~kept, reader.victims), (kept, reader.kept)):
                numbers = (-firsts[part]).tolist()
                listed = dict(zip((keys[place] for place in left[part].tolist()), numbers, strict=True))
                self._put_all(listed, reader, heap)
            left = left[~needed]
        self._put_all({keys[place]: self._used(keys[place]) for place in left.tolist()}, None, self._unplanned)

    def _put_all(self, listed: dict[bytes, int], home: Reader | None, heap: LazyHeap) -> None:
        if listed:
            self._home.update(dict.fromkeys(listed, home))
            heap.put_all(listed.items())
