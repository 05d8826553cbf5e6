"""What all sessions together will read: the next use of a shard, and the next shard that is missing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from cacheloader_daemon.plan import retention
from cacheloader_daemon.plan.accesses import NEVER, AccessTable, plan_digest
from cacheloader_daemon.plan.readers import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from cacheloader_daemon.plan.events import PlanFollowed, ShardRef
    from cacheloader_daemon.plan.readers import Session

INFINITE = float("inf")


class Catalog:
    """The shards of a data set that some sessions opened, and the plans they follow over them.

    Args:
        shards: In manifest order.
    """

    def __init__(self, shards: Sequence[ShardRef]) -> None:
        self.shards = shards
        self.keys = [shard.key for shard in shards]
        self.reserve_bytes = np.fromiter((shard.reserve_bytes for shard in shards), dtype=np.int64, count=len(shards))
        self.index: dict[bytes, int] = {}
        for place, key in enumerate(self.keys):
            self.index.setdefault(key, place)
        self.canonical = np.fromiter((self.index[key] for key in self.keys), dtype=np.int32, count=len(shards))
        self.present = np.zeros(len(shards), dtype=np.uint8)
        self.kept = np.zeros(len(shards), dtype=bool)
        """Shards that stay from epoch to epoch, see ``retention``."""
        self.to_fill: deque[int] = deque()
        """Of them, those that were missing when they were chosen, soonest use first."""
        self.num_sessions = 0
        self.readers: dict[bytes, list[Reader]] = {}
        """By digest of the plan."""
        self._rank: NDArray[np.int64] | None = None
        self._draft: AccessTable | None = None

    @property
    def rank(self) -> NDArray[np.int64]:
        """Places in the order of their keys, which are hashes."""
        if self._rank is None:
            self._rank = np.argsort(np.array([int.from_bytes(key[:8], "big") for key in self.keys], dtype=np.uint64))
        return self._rank

    def places(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Index of each key, -1 for one that is not part of it."""
        return np.fromiter((self.index.get(key, -1) for key in keys), dtype=np.int64, count=len(keys))

    def table(self, plan: PlanFollowed) -> AccessTable:
        """The plan's table, an existing one where somebody follows an equal plan or it was asked for just before.

        Raises:
            ProtocolError: The arrays break the rules of a plan.
        """
        digest = plan_digest(plan.first_clock, plan.stop_clock, plan.shard)
        if digest in self.readers:
            return self.readers[digest][0].table
        if self._draft is None or self._draft.digest != digest:
            self._draft = AccessTable(
                digest=digest,
                first_clock=plan.first_clock,
                stop_clock=plan.stop_clock,
                shard=plan.shard,
                canonical=self.canonical,
                reserve_bytes=self.reserve_bytes,
            )
        return self._draft


@dataclass(frozen=True, slots=True)
class NextUse:
    """When a shard is needed next.

    Attributes:
        seconds: From now; 0 if somebody is in the middle of it, infinite if no plan names it.
        reader: Who needs it first.
        first_clock: At which of the reader's rows.
    """

    seconds: float
    reader: Reader | None
    first_clock: int


@dataclass(frozen=True, slots=True)
class Missing:
    """A shard that is neither there nor on its way.

    Attributes:
        key: The shard.
        reserve_bytes: Its reservation.
        seconds: Time until its next use.
        owner: Who needs it.
    """

    key: bytes
    reserve_bytes: int
    seconds: float
    owner: str


class Horizon:
    """The catalogs of all data sets that are open, and all readers."""

    def __init__(self) -> None:
        self.catalogs: list[Catalog] = []
        self.readers: list[Reader] = []
        self.typical_rows_per_s = 1.0
        self.working_set_bytes = 0
        self.largest_shard_bytes = 0
        self.planned_bytes = 0
        """Reservations of all shards that some plan names."""
        self.kept_bytes = 0
        """Of them, those that are to stay."""
        self._chosen_for: object = None
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
                yield Missing(key, int(catalog.reserve_bytes[place]), until, reader.session.owner)
            following = self._missing_from(reader, access + 1)
            if following == reader.table.num_accesses:
                heappop(heap)
                continue
            until = self.seconds_until(reader, reader.table.first_of(following), now_s)
            heapreplace(heap, (until, number, following, reader))

    def next_to_fill(self, free_bytes: int, now_s: float) -> Missing | None:
        """A shard that is to stay and is missing, of a reader that has begun to read, if it fits into free space."""
        for catalog in self.catalogs:
            if not catalog.to_fill or not any(
                reader.has_begun for readers in catalog.readers.values() for reader in readers
            ):
                continue
            while catalog.to_fill:
                place = catalog.to_fill[0]
                if not catalog.present[place]:
                    reserve_bytes = int(catalog.reserve_bytes[place])
                    if reserve_bytes > free_bytes:
                        break
                    catalog.to_fill.popleft()
                    use = self.next_use(catalog.keys[place], now_s)
                    reader = use.reader or next(chain.from_iterable(catalog.readers.values()))
                    return Missing(catalog.keys[place], reserve_bytes, use.seconds, reader.session.owner)
                catalog.to_fill.popleft()
        return None

    def is_kept(self, key: bytes) -> bool:
        """Whether a shard is to stay."""
        return any((place := catalog.index.get(key)) is not None and catalog.kept[place] for catalog in self.catalogs)

    def choose_kept(self, capacity_bytes: int, lookahead_bytes: int) -> list[bytes]:
        """Decide anew which shards stay; to be called when plans have changed.

        Args:
            capacity_bytes: Reservations that the cache can hold.
            lookahead_bytes: Of them, what shards fetched ahead may take.

        Returns:
            The shards for which the answer changed.
        """
        plans = tuple(digest for catalog in self.catalogs for digest in (id(catalog), *sorted(catalog.readers)))
        if (capacity_bytes, lookahead_bytes, plans) == self._chosen_for:
            return []
        self._chosen_for = capacity_bytes, lookahead_bytes, plans
        wanted = [(catalog, *self._union(catalog)) for catalog in self.catalogs]
        bytes_of = [int(catalog.reserve_bytes[used].sum()) for catalog, used, _ in wanted]
        self.planned_bytes = sum(bytes_of)
        budget_bytes = float(capacity_bytes)
        if self.planned_bytes > capacity_bytes:
            # Shards that do not stay have to pass: those ahead, and of those in use what is not kept.
            missing = 1 - capacity_bytes / self.planned_bytes
            budget_bytes = max(0.0, capacity_bytes - lookahead_bytes - self.working_set_bytes * missing)
        changed: list[bytes] = []
        self.kept_bytes = 0
        for (catalog, used, is_shared), size_bytes in zip(wanted, bytes_of, strict=True):
            kept = np.zeros(len(catalog.keys), dtype=bool)
            if size_bytes and not (is_shared and self.planned_bytes > capacity_bytes):
                kept = retention.chosen(
                    used,
                    rank=catalog.rank,
                    reserve_bytes=catalog.reserve_bytes,
                    budget_bytes=int(min(1.0, budget_bytes / self.planned_bytes) * size_bytes),
                )
            changed += [catalog.keys[place] for place in np.flatnonzero(kept != catalog.kept).tolist()]
            catalog.kept = kept
            catalog.to_fill = self._fillable(catalog)
            self.kept_bytes += int(catalog.reserve_bytes[kept].sum())
        return changed

    def _union(self, catalog: Catalog) -> tuple[NDArray[np.bool_], bool]:
        if not catalog.readers:
            return np.zeros(len(catalog.keys), dtype=bool), False
        used = retention.scans([readers[0].table for readers in catalog.readers.values()])
        return retention.union(used, catalog.reserve_bytes)

    def _fillable(self, catalog: Catalog) -> deque[int]:
        places = np.flatnonzero(catalog.kept & (catalog.present == 0))
        soonest = np.full(len(places), NEVER, dtype=np.int64)
        for readers in catalog.readers.values():
            clock = max(reader.session.clock for reader in readers)
            firsts = readers[0].table.next_firsts(places, clock)
            soonest = np.minimum(soonest, np.where(firsts == NEVER, NEVER, firsts - clock))
        order = np.argsort(soonest, kind="stable")
        return deque(places[order[soonest[order] != NEVER]].tolist())

    def _missing_from(self, reader: Reader, access: int) -> int:
        return reader.table.next_missing(reader.session.catalog.present, access, reader.session.clock)

    def _remeasure(self) -> None:
        self.working_set_bytes = sum(
            readers[0].table.peak.size_bytes for catalog in self.catalogs for readers in catalog.readers.values()
        )
        self.largest_shard_bytes = max(
            (int(catalog.reserve_bytes.max()) for catalog in self.catalogs if len(catalog.keys)), default=0
        )
