"""What all sessions together will read: the next use of a shard, and the next shard that is missing."""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cacheloader_daemon.plan.accesses import NEVER
from cacheloader_daemon.plan.catalog import Catalog
from cacheloader_daemon.plan.readers import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheloader_daemon.plan.accesses import AccessTable
    from cacheloader_daemon.plan.events import ShardRef
    from cacheloader_daemon.plan.readers import Session

INFINITE = float("inf")


class NextUse(msgspec.Struct, frozen=True):
    """When a shard is needed next.

    Attributes:
        seconds: From now; 0 if somebody is in the middle of it, infinite if no plan names it.
        reader: Who needs it first.
        first_clock: At which of the reader's rows.
    """

    seconds: float
    reader: Reader | None
    first_clock: int


class Missing(msgspec.Struct, frozen=True):
    """A shard that is neither there nor on its way.

    Attributes:
        key: The shard.
        reserve_bytes: Its reservation.
        seconds: Time until its next use.
        owner: Who needs it.
        is_beyond: Whether it has been read in this epoch, so that it is the next one that needs it.
    """

    key: bytes
    reserve_bytes: int
    seconds: float
    owner: str
    is_beyond: bool = False


class Horizon:
    """The catalogs of all data sets that are open, and all readers."""

    def __init__(self) -> None:
        self.catalogs: list[Catalog] = []
        self.readers: list[Reader] = []
        self.typical_rows_per_s = 1.0
        self.working_set_bytes = 0
        self.largest_shard_bytes = 0
        self._tracked: set[bytes] = set()
        self._hungry: set[Reader] = set()

    def open(self, shards: Sequence[ShardRef]) -> Catalog:
        """The catalog for a new session, an existing one where it reads the same shards."""
        catalog = next((catalog for catalog in self.catalogs if catalog.shards is shards), None)
        if catalog is None:
            catalog = self._catalog(shards)
        catalog.num_sessions += 1
        return catalog

    def _catalog(self, shards: Sequence[ShardRef]) -> Catalog:
        fresh = Catalog(shards)
        for catalog in self.catalogs:
            if catalog.keys == fresh.keys and np.array_equal(catalog.reserve_bytes, fresh.reserve_bytes):
                return catalog
        for key in fresh.index.keys() & self._tracked:
            fresh.present[fresh.index[key]] = 1
        self.catalogs.append(fresh)
        self._remeasure()
        return fresh

    def close(self, catalog: Catalog) -> None:
        """One session fewer reads ``catalog``."""
        catalog.num_sessions -= 1
        if not catalog.num_sessions:
            self.catalogs.remove(catalog)
            self._remeasure()

    def follow(self, session: Session, table: AccessTable) -> Reader:
        """A reader for ``session``, whose clock is set and who follows no plan."""
        reader = Reader(session, table)
        session.catalog.readers.setdefault(table.digest, []).append(reader)
        self.readers.append(reader)
        self._hungry.add(reader)
        session.reader = reader
        self._remeasure()
        return reader

    def leave(self, session: Session) -> Reader | None:
        """The session follows no plan from now on; returns its former reader."""
        reader = session.reader
        if reader is None:
            return None
        session.reader = None
        companions = session.catalog.readers[reader.table.digest]
        companions.remove(reader)
        if not companions:
            del session.catalog.readers[reader.table.digest]
        self.readers.remove(reader)
        self._hungry.discard(reader)
        self._remeasure()
        return reader

    def next_use(self, key: bytes, now_s: float) -> NextUse:
        """The earliest next use of ``key`` over all readers."""
        seconds, found, first_clock = INFINITE, None, NEVER
        for catalog in self.catalogs:
            place = catalog.index.get(key)
            if place is None:
                continue
            for readers in catalog.readers.values():
                table = readers[0].table
                if not table.uses(place):
                    continue
                for reader in readers:
                    first = table.next_first(place, reader.session.clock)
                    if first == NEVER:
                        continue
                    until = reader.seconds_until(first, now_s, self.typical_rows_per_s)
                    if until < seconds:
                        seconds, found, first_clock = until, reader, first
        return NextUse(seconds, found, first_clock)

    def seconds_until(self, reader: Reader, first_clock: int, now_s: float) -> float:
        """Time until ``reader`` reaches a row."""
        return reader.seconds_until(first_clock, now_s, self.typical_rows_per_s)

    def coming(self, reader: Reader) -> Iterator[bytes]:
        """Every shard that ``reader`` needs from now on, once."""
        keys = reader.session.catalog.keys
        return (keys[place] for place in reader.table.coming(reader.session.clock).tolist())

    def slowest_readers(self) -> Iterator[Reader]:
        """Of each plan the reader that has most of it before it."""
        for catalog in self.catalogs:
            for readers in catalog.readers.values():
                yield min(readers, key=lambda reader: reader.session.clock)

    def track(self, key: bytes) -> None:
        """``key`` is there, on its way or not to be fetched for the moment."""
        self._tracked.add(key)
        for catalog in self.catalogs:
            place = catalog.index.get(key)
            if place is not None:
                catalog.present[place] = 1

    def untrack(self, key: bytes) -> None:
        """``key`` is missing now."""
        self._tracked.discard(key)
        for catalog in self.catalogs:
            place = catalog.index.get(key)
            if place is None:
                continue
            catalog.present[place] = 0
            for readers in catalog.readers.values():
                table = readers[0].table
                if not table.uses(place):
                    continue
                for reader in readers:
                    access = table.next_access(place, reader.session.clock)
                    if access < reader.frontier:
                        reader.frontier = access
                        self._hungry.add(reader)

    def is_tracked(self, key: bytes) -> bool:
        """Whether ``key`` is not to be prefetched now."""
        return key in self._tracked

    def is_hungry(self, reader: Reader) -> bool:
        """Whether the reader's frontier may be a missing shard."""
        return reader in self._hungry

    @property
    def has_missing(self) -> bool:
        """Whether some reader may still find a missing shard; false means surely none."""
        return bool(self._hungry)

    def missing(self, now_s: float) -> Iterator[Missing]:
        """Missing shards, earliest next use first. Shards may be tracked while this is iterated, not untracked."""
        heap: list[tuple[float, int, int, Reader]] = []
        for number, reader in enumerate(sorted(self._hungry, key=lambda reader: reader.session.number)):
            reader.frontier = self._missing_from(reader, reader.frontier)
            if reader.frontier == reader.table.num_accesses:
                self._hungry.discard(reader)
                continue
            until = self.seconds_until(reader, reader.table.first_of(reader.frontier), now_s)
            heap.append((until, number, reader.frontier, reader))
        heapify(heap)
        offered: set[bytes] = set()
        while heap:
            until, number, access, reader = heap[0]
            catalog = reader.session.catalog
            place = reader.table.shard_of(access)
            key = catalog.keys[place]
            if key not in offered and not catalog.present[place]:
                offered.add(key)
                table, clock = reader.table, reader.session.clock
                is_beyond = table.is_repeated(place) and table.num_coming(place, clock) < 2
                yield Missing(key, int(catalog.reserve_bytes[place]), until, reader.session.owner, is_beyond)
            following = self._missing_from(reader, access + 1)
            if following == reader.table.num_accesses:
                heappop(heap)
                continue
            until = self.seconds_until(reader, reader.table.first_of(following), now_s)
            heapreplace(heap, (until, number, following, reader))

    def is_kept(self, key: bytes) -> bool:
        """Whether a shard is to stay."""
        return any((place := catalog.index.get(key)) is not None and catalog.kept[place] for catalog in self.catalogs)

    def _missing_from(self, reader: Reader, access: int) -> int:
        return reader.table.next_missing(reader.session.catalog.present, access, reader.session.clock)

    def _remeasure(self) -> None:
        self.working_set_bytes = sum(
            readers[0].table.peak.size_bytes for catalog in self.catalogs for readers in catalog.readers.values()
        )
        self.largest_shard_bytes = max(
            (int(catalog.reserve_bytes.max()) for catalog in self.catalogs if len(catalog.keys)), default=0
        )
