"""The planner: facts in, orders out. It knows no clock, socket or file, so every run of it can be repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from cacheloader_daemon.plan.admission import Admission
from cacheloader_daemon.plan.effects import Effect, Grant, Promote, Refuse
from cacheloader_daemon.plan.events import (
    Advanced,
    Demanded,
    Dropped,
    Event,
    FetchFailed,
    FetchFinished,
    PlanFollowed,
    Released,
    SessionClosed,
    SessionOpened,
)
from cacheloader_daemon.plan.holdings import Holdings, Wait
from cacheloader_daemon.plan.horizon import Horizon
from cacheloader_daemon.plan.invariants import check
from cacheloader_daemon.plan.keeping import Keeping
from cacheloader_daemon.plan.ledger import Ledger
from cacheloader_daemon.plan.options import WorkingSet
from cacheloader_daemon.plan.readers import Session
from cacheloader_daemon.plan.rests import Rests
from cacheloader_daemon.plan.shares import Shares
from cacheloader_daemon.plan.states import ShardState
from cacheloader_daemon.plan.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cacheloader_daemon.plan.options import PlannerOptions, PlannerStatistics


CAPACITY_STEPS = 1024
"""How finely the capacity is told apart when it is decided which shards stay."""


class Planner:
    """Decides what to fetch, keep and drop for all sessions of a node.

    The runtime reports every fact once, in the order in which the facts happened, and carries out the effects in the
    order in which they are returned. In particular:

    - ``Grant`` counts as a lease at once. A grant that cannot be honoured (the blob is damaged) is taken back by
      ``Released``, ``Dropped`` and a new ``Demanded``.
    - ``Released`` is for blobs alone: the planner forgets a request as soon as it is served from memory.
    - ``Evict`` is answered by one ``Dropped`` of the same key.
    - While ``wake_at_s`` is a time, a request waits for space, and ``wake`` is called then unless an event comes first.

    Args:
        options: The bounds.
        resident: Blobs found in the store, the one used longest ago first, with their bytes on disk.
        overhead_bytes: What the cache directory holds besides blobs.
    """

    def __init__(
        self, options: PlannerOptions, *, resident: Iterable[tuple[bytes, int]] = (), overhead_bytes: int = 0
    ) -> None:
        self._options = options
        self._horizon = Horizon()
        self._keeping = Keeping(self._horizon)
        self._ledger = Ledger(quota_bytes=options.quota_bytes, overhead_bytes=overhead_bytes)
        self._rests = Rests(options.retry_s)
        self._shares = Shares(options.shares)
        self._holdings = Holdings(self._ledger, self._horizon, self._rests, self._shares)
        self._sessions: dict[int, Session] = {}
        self._admission = Admission(options, self._holdings, self._horizon, self._keeping, self._sessions)
        self._now_s = 0.0
        self._tally = Tally()
        for key, used_bytes in resident:
            self._holdings.found(key, used_bytes)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take note of a fact and say what to do.

        Args:
            event: What has happened.
            now_s: When, on a monotonic clock; a time before that of an earlier event counts as that.

        Raises:
            IllegalEvent: It cannot have happened. The planner is as it was before.
            ProtocolError: The arrays of a plan break its rules. Likewise.
        """
        now_s = self._now_s = max(now_s, self._now_s)
        self._admission.crowd.passed(now_s, self._holdings.num_fetching)
        effects: list[Effect] = []
        match event:
            case SessionOpened():
                self._opened(event, now_s)
            case SessionClosed():
                self._closed(event, now_s)
            case PlanFollowed():
                self._followed(event, now_s)
            case Advanced():
                self._advanced(event, now_s)
            case Demanded():
                self._demanded(event, now_s, effects)
            case Released():
                self._released(event, now_s)
            case FetchFinished():
                self._fetch_finished(event, now_s, effects)
            case FetchFailed():
                self._fetch_failed(event, now_s, effects)
            case Dropped():
                self._dropped(event, now_s)
            case _:
                assert_never(event)
        self._holdings.end_rests(now_s)
        self._admission.run(now_s, effects)
        return effects

    def wake(self, now_s: float) -> list[Effect]:
        """Do what is due by time alone; to be called at ``wake_at_s``."""
        now_s = self._now_s = max(now_s, self._now_s)
        self._admission.crowd.passed(now_s, self._holdings.num_fetching)
        effects: list[Effect] = []
        self._holdings.end_rests(now_s)
        self._admission.run(now_s, effects)
        return effects

    @property
    def wake_at_s(self) -> float | None:
        """When ``wake`` is due if no event comes before, ``None`` if nothing waits for space."""
        return self._admission.wake_at_s

    def set_overhead(self, overhead_bytes: int) -> None:
        """What the cache directory holds besides blobs, measured again; evictions follow with the next event."""
        self._ledger.set_overhead(overhead_bytes)

    def set_room(self, quota_bytes: int, *, takes_shards: bool) -> None:
        """What the disks allow now: a quota up to that of the options, and whether anything can be put there at all.

        What follows from it comes with the next event. Plans are still measured by the quota of the options: what does
        not fit for a while is served from memory.
        """
        self._ledger.set_quota(min(quota_bytes, self._options.quota_bytes))
        self._admission.takes_shards = takes_shards

    def is_resident(self, key: bytes) -> bool:
        """Whether a shard is a blob that nobody has chosen as victim."""
        return self._holdings.state(key) is ShardState.RESIDENT

    def working_set(self, plan: PlanFollowed) -> WorkingSet:
        """The most that ``plan`` needs at one moment; ask before the plan is reported, and refuse one that cannot fit.

        Raises:
            IllegalEvent: The session is not open.
            ProtocolError: The arrays of the plan break its rules.
        """
        session = self._session(plan.session)
        peak = session.catalog.table(plan).peak
        return WorkingSet(
            peak_bytes=peak.size_bytes,
            peak_clock=peak.clock,
            num_shards=peak.num_shards,
            quota_bytes=self._shares.most_bytes(session.owner, self._options.quota_bytes),
            overhead_bytes=self._ledger.overhead_bytes,
        )

    def is_unwanted(self, key: bytes) -> bool:
        """Whether a shard is on its way for nobody: no request waits for it, and no plan needs it."""
        shard = self._holdings.shards.get(key)
        return (
            shard is not None
            and shard.state is ShardState.FETCHING
            and not shard.waits
            and self._horizon.next_use(key, self._now_s).reader is None
        )

    def check_invariants(self) -> None:
        """Assert what has to be true between any two events."""
        check(self._holdings, self._horizon, self._sessions, resting=frozenset(self._rests))

    def statistics(self) -> PlannerStatistics:
        """Numbers for people and for metrics."""
        return self._tally.statistics(
            self._holdings,
            self._admission,
            self._sessions,
            kept_bytes=self._keeping.kept_bytes,
            least_bytes=max(0, self._keeping.planned_bytes - self._capacity_bytes),
        )

    @property
    def _capacity_bytes(self) -> int:
        """Reservations of all shards that the cache could hold, as far as it is known what shards really take."""
        capacity_bytes = max(0, self._ledger.capacity_bytes)
        capacity_bytes = int(capacity_bytes / self._admission.used_part)
        # In steps, so that what stays does not change with every byte of the index.
        step_bytes = max(1, capacity_bytes // CAPACITY_STEPS)
        return capacity_bytes // step_bytes * step_bytes

    def _session(self, number: int) -> Session:
        session = self._sessions.get(number)
        if session is None:
            raise self._holdings.illegal(f"session {number} is not open")
        return session

    def _key(self, session: Session, shard: int) -> bytes:
        keys = session.catalog.keys
        if not 0 <= shard < len(keys):
            raise self._holdings.illegal(f"shard {shard} of a data set of {len(keys)} shards")
        return keys[shard]

    def _opened(self, event: SessionOpened, now_s: float) -> None:
        if event.session in self._sessions:
            raise self._holdings.illegal(f"session {event.session} is open already")
        catalog = self._horizon.open(event.shards)
        self._sessions[event.session] = Session(event.session, catalog, now_s, event.owner)

    def _closed(self, event: SessionClosed, now_s: float) -> None:
        session = self._session(event.session)
        del self._sessions[event.session]
        former = self._horizon.leave(session)
        if former is not None:
            self._holdings.victims.left(former)
        for request, key in session.waits.items():
            self._holdings.unwait(self._holdings.shards[key], Wait(session, request), now_s)
        for key, count in list(session.leases.items()):
            for _ in range(count):
                self._holdings.release(self._holdings.shards[key], session, now_s)
        self._horizon.close(session.catalog)
        self._plans_changed(now_s)
        if not self._sessions:
            self._rests.forget_failures()

    def _followed(self, event: PlanFollowed, now_s: float) -> None:
        session = self._session(event.session)
        if event.clock < 0:
            raise self._holdings.illegal(f"session {event.session} follows a plan from row {event.clock}")
        table = session.catalog.table(event)
        session.seen_s = now_s
        former = self._horizon.leave(session)
        session.jump(event.clock, now_s)
        if self._options.eviction == "lru":
            return
        reader = self._horizon.follow(session, table)
        self._holdings.victims.followed(reader, former)
        self._plans_changed(now_s)

    def _advanced(self, event: Advanced, now_s: float) -> None:
        session = self._session(event.session)
        session.seen_s = now_s
        if event.clock <= session.clock:
            # To have finished with fewer rows than before is still true, and says nothing new.
            return
        session.move(event.clock, now_s)
        if session.pace.rows_per_s is not None:
            self._horizon.typical_rows_per_s = session.pace.rows_per_s
        reader = session.reader
        if reader is None:
            return
        passed = reader.pass_rows().tolist()
        session.catalog.num_passed += len(passed)
        for place in passed:
            key = session.catalog.keys[place]
            self._holdings.not_ahead(key)
            self._holdings.victims.passed(key, reader, now_s)
            if session.catalog.kept[place]:
                session.catalog.spent.append(place)

    def _demanded(self, event: Demanded, now_s: float, effects: list[Effect]) -> None:
        session = self._session(event.session)
        key = self._key(session, event.shard)
        if event.request in session.waits:
            raise self._holdings.illegal(f"session {event.session} waits as request {event.request} already", key)
        session.seen_s = now_s
        reserve_bytes = int(session.catalog.reserve_bytes[event.shard])
        wait = Wait(session, event.request)
        shard = self._holdings.shards.get(key)
        match self._holdings.state(key):
            case ShardState.RESIDENT:
                assert shard is not None
                self._tally.hits += 1
                self._holdings.lease(shard, session, now_s)
                effects.append(Grant(session=event.session, request=event.request, key=key, hit=True))
                return
            case ShardState.UNLINKED:
                # Its path is free, but two blobs of one key would have to be told apart for a case this rare.
                self._tally.misses += 1
                self._admission.answer_from_memory(session, event.request, key, now_s, effects)
                return
            case ShardState.ABSENT:
                self._tally.misses += 1
                self._holdings.want(key, reserve_bytes, wait, now_s)
            case ShardState.FETCHING:
                assert shard is not None
                self._tally.coalesced += 1
                if not shard.demand:
                    self._tally.promoted += 1
                    effects.append(Promote(key=key))
                self._holdings.join(shard, reserve_bytes, wait, now_s)
            case ShardState.WANTED | ShardState.EVICTING:
                assert shard is not None
                if shard.waits:
                    self._tally.coalesced += 1
                else:
                    self._tally.misses += 1
                self._holdings.join(shard, reserve_bytes, wait, now_s)
            case state:
                assert_never(state)
        session.wait(event.request, key, now_s)

    def _released(self, event: Released, now_s: float) -> None:
        session = self._session(event.session)
        key = self._key(session, event.shard)
        if key not in session.leases:
            raise self._holdings.illegal(f"session {event.session} released a lease that it does not hold", key)
        session.seen_s = now_s
        self._holdings.release(self._holdings.shards[key], session, now_s)

    def _fetch_finished(self, event: FetchFinished, now_s: float, effects: list[Effect]) -> None:
        shard = self._holdings.shards.get(event.key)
        if shard is None or shard.state is not ShardState.FETCHING:
            raise self._holdings.illegal("a fetch finished that was not ordered", event.key)
        if not 0 <= event.used_bytes <= shard.reserve_bytes:
            raise self._holdings.illegal(
                f"a blob takes {event.used_bytes} bytes and {shard.reserve_bytes} were reserved", event.key
            )
        used_part = self._tally.fetched(used_bytes=event.used_bytes, reserve_bytes=shard.reserve_bytes)
        self._admission.fetch_times.add(now_s - shard.began_s)
        self._admission.crowd.brought(event.used_bytes)
        self._rests.succeeded(event.key)
        for wait in self._holdings.commit(shard, event.used_bytes, now_s):
            wait.session.answered(wait.request, now_s)
            self._holdings.lease(shard, wait.session, now_s)
            effects.append(Grant(session=wait.session.number, request=wait.request, key=event.key, hit=False))
        if used_part not in (self._admission.used_part, 0.0):
            self._admission.used_part = used_part
            self._plans_changed(now_s)

    def _fetch_failed(self, event: FetchFailed, now_s: float, effects: list[Effect]) -> None:
        shard = self._holdings.shards.get(event.key)
        if shard is None or shard.state is not ShardState.FETCHING:
            raise self._holdings.illegal("a fetch failed that was not ordered", event.key)
        self._tally.failed += 1
        if event.disk:
            # The next prefetch would meet the same disk; demands go on trying, since each has a way around it.
            self._admission.prefetch_rests_until_s = now_s + self._options.retry_s
        for wait in self._holdings.fail(shard, now_s):
            if event.disk:
                self._admission.answer_from_memory(wait.session, wait.request, event.key, now_s, effects)
                continue
            wait.session.answered(wait.request, now_s)
            self._tally.refusals += 1
            effects.append(Refuse(session=wait.session.number, request=wait.request, key=event.key))

    def _dropped(self, event: Dropped, now_s: float) -> None:
        shard = self._holdings.shards.get(event.key)
        if shard is None or shard.state not in {ShardState.EVICTING, ShardState.RESIDENT}:
            raise self._holdings.illegal("a blob was dropped that is not there", event.key)
        if shard.state is ShardState.RESIDENT:
            self._tally.lost += 1
        self._holdings.drop(shard, now_s)

    def _plans_changed(self, now_s: float) -> None:
        self._holdings.victims.relist(self._keeping.choose(self._capacity_bytes), now_s)
        # What was fetched ahead for a plan that nobody follows any more does not use up the window.
        for key in (*self._holdings.ahead, *self._holdings.traded):
            if self._horizon.next_use(key, now_s).reader is None:
                self._holdings.not_ahead(key)
