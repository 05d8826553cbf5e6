"""Where everything meets: what happens becomes an event of the planner, and what the planner wants is done.

All events pass through ``_tell``, on the loop's thread, one after the other. Effects that take time run as tasks and
end in another event. Nothing here decides what to fetch, keep or drop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, assert_never

import msgspec

from cacheloader.errors import CacheloaderError, ProtocolError, QuotaTooSmall, masked_urls
from cacheloader_daemon.arrivals import News
from cacheloader_daemon.bringing import Bringer
from cacheloader_daemon.fetching import Fetches
from cacheloader_daemon.granting import Grants
from cacheloader_daemon.memory import MemoryServing
from cacheloader_daemon.plan import effects, events
from cacheloader_daemon.sessions import Session, Wait, Waits
from cacheloader_daemon.store import DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from cacheloader.protocol.plans import Accesses
    from cacheloader_daemon.account import Account
    from cacheloader_daemon.arrivals import OriginTrouble
    from cacheloader_daemon.fetch import Fetcher
    from cacheloader_daemon.lease import ShardLease
    from cacheloader_daemon.plan.machine import Planner
    from cacheloader_daemon.plan.options import PlannerStatistics
    from cacheloader_daemon.proofs import Proofs
    from cacheloader_daemon.shards import Dataset
    from cacheloader_daemon.tenants import Visitor

    Deliver = Callable[["ShardLease | CacheloaderError"], None]

log = logging.getLogger(__name__)

SLACK = 1.25
"""How much more than before a data set that was let in may need at once; more is another ``shuffle_window``."""

MEASURE_INTERVAL_S = 1.0
"""How often the directory's overhead is measured while shards arrive; the store overstates it for the time between."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One session at one moment.

    Attributes:
        uri: First shard of its data set, without what is secret in a URL.
        num_shards: Shards of it.
        total_bytes: Their bytes.
        leases: Leases that it holds.
        waiting: Shards that it waits for.
        uid: User; ``None`` for the one user of a private daemon.
        tenant: Whose share of the daemon it uses, "" without tenants.
    """

    uri: str
    num_shards: int
    total_bytes: int
    leases: int
    waiting: int
    uid: int | None = None
    tenant: str = ""


class Runtime:
    """Carries out the planner's effects. All methods belong to the loop's thread.

    Args:
        planner: Decides; told of everything here and nowhere else.
        fetcher: Brings shards, opens and drops blobs.
        account: Counts.
        tasks: Owner of every task; it has to be entered already.
        max_memory_bytes: Bytes of shards that may be served past the cache at once.
        proofs: Who may read what; ``None`` where all clients have the same rights.
        overhead_bytes: What the cache held besides blobs when it was opened.
    """

    def __init__(
        self,
        *,
        planner: Planner,
        fetcher: Fetcher,
        account: Account,
        tasks: asyncio.TaskGroup,
        max_memory_bytes: int,
        proofs: Proofs | None = None,
        overhead_bytes: int = 0,
    ) -> None:
        self.account = account
        self._planner = planner
        self._fetcher = fetcher
        self._group = tasks
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        # ``None`` stands for the passing of time alone.
        self._events: deque[events.Event | None] = deque()
        self._is_telling = False
        self._sessions: dict[int, Session] = {}
        self._waits = Waits()
        self._bringer = Bringer(self._sessions, account, proofs=proofs)
        self._grants = Grants(
            fetcher=fetcher,
            bringer=self._bringer,
            account=account,
            sessions=self._sessions,
            tell=self._tell,
            demand=self._demand,
            past_the_cache=self._serve_from_memory,
            now_s=self._loop.time,
        )
        self._memory = MemoryServing(
            max_bytes=max_memory_bytes,
            sessions=self._sessions,
            fetcher=fetcher,
            bringer=self._bringer,
            account=account,
            spawn=self.spawn,
            hand_out=self._grants.hand_out,
        )
        self._fetches = Fetches(
            planner=planner,
            fetcher=fetcher,
            bringer=self._bringer,
            account=account,
            sessions=self._sessions,
            waits=self._waits,
            spawn=self.spawn,
            tell=self._fetched,
        )
        self._numbers = itertools.count(1)
        self._let_in: dict[str, int] = {}
        self._measured_s = 0.0
        self._overhead_bytes = overhead_bytes
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s: float | None = None

    def session_records(self) -> list[SessionRecord]:
        """What each session reads, scans included."""
        waiting = self._waits.count()
        return [
            SessionRecord(
                uri=masked_urls(state.dataset.manifest.uri(0)) if len(state.dataset.manifest) else "",
                num_shards=len(state.dataset.manifest),
                total_bytes=state.dataset.manifest.total_bytes,
                leases=state.leases.total() + self._memory.num_leases(session),
                waiting=waiting[session],
                uid=None if state.visitor is None else state.visitor.uid,
                tenant="" if state.visitor is None else state.visitor.owner,
            )
            for session, state in self._sessions.items()
        ]

    def plan_statistics(self) -> PlannerStatistics:
        """What the planner knows."""
        return self._planner.statistics()

    def origin_troubles(self) -> tuple[OriginTrouble, ...]:
        """Stores that have failed since they last delivered a shard."""
        return self._fetcher.arrivals.troubles()

    def news(self, session: int, shard: int) -> News:
        """How a request of the session for a shard stands."""
        key = self._sessions[session].dataset.shards[shard].key
        return self._fetcher.arrivals.news(key) or News(stage="waiting for its turn or for space in the cache")

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run ``work`` until it ends or the daemon does. It has to catch what it raises."""
        task = self._group.create_task(_guarded(work))
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            work.close()  # a task that is cancelled before it starts has never looked at it

        task.add_done_callback(ended)
        return task

    def stop(self) -> None:
        """Cancel all work; the task group then ends once every task has cleaned up."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._fetches.stop()
        for task in list(self._tasks):
            task.cancel()

    def open_session(self, dataset: Dataset, *, visitor: Visitor | None = None) -> int:
        """A number for a new session that reads ``dataset`` on behalf of ``visitor``."""
        session = next(self._numbers)
        owner = "" if visitor is None else visitor.owner
        self._sessions[session] = Session(dataset=dataset, visitor=visitor)
        self._tell(events.SessionOpened(session=session, shards=dataset.shards, owner=owner))
        return session

    def close_session(self, session: int) -> None:
        """The session's plan, waits and leases end."""
        del self._sessions[session]
        self._waits.end(session)
        self._memory.close(session)
        if not self._sessions:
            self._grants.forget()
            self._let_in.clear()
        self._tell(events.SessionClosed(session=session))
        self._fetches.end_unwanted()

    def follow(self, session: int, accesses: Accesses, *, clock: int) -> None:
        """Take the session's coming accesses, in place of an earlier plan.

        Raises:
            QuotaTooSmall: The cache cannot hold what they need at one moment; an earlier plan stays.
            ProtocolError: They break the rules of a plan. Likewise.
        """
        plan = events.PlanFollowed(
            session=session,
            first_clock=accesses.first_clock,
            stop_clock=accesses.stop_clock,
            shard=accesses.shard,
            clock=clock,
        )
        needed = self._planner.working_set(plan)
        digest = self._sessions[session].dataset.manifest.digest
        # Windows differ a little from epoch to epoch. A job that was let in is not turned away for that: what does not
        # fit for a moment is served from memory.
        if not needed.fits and needed.peak_bytes > SLACK * self._let_in.get(digest, 0):
            raise QuotaTooSmall(needed.shortfall)
        if needed.fits:
            self._let_in[digest] = max(needed.peak_bytes, self._let_in.get(digest, 0))
        self._tell(plan)
        self._fetches.end_unwanted()

    def advance(self, session: int, clock: int) -> None:
        """The session has finished with every row before ``clock``."""
        self._tell(events.Advanced(session=session, clock=clock))

    def demand(self, session: int, shard: int, deliver: Deliver) -> None:
        """Ask for a lease of a shard; ``deliver`` gets it, or an error, once, unless the session ends before."""
        key = self._sessions[session].dataset.shards[shard].key
        self._demand(Wait(session=session, shard=shard, key=key, deliver=deliver))

    async def acquire(self, session: int, shard: int) -> ShardLease:
        """As ``demand``, for a task of the daemon's own.

        Raises:
            CacheloaderError: The shard cannot be had.
        """
        outcome: asyncio.Future[ShardLease] = self._loop.create_future()

        def deliver(delivered: ShardLease | CacheloaderError) -> None:
            if isinstance(delivered, CacheloaderError):
                if not outcome.done():
                    outcome.set_exception(delivered)
            elif outcome.done():
                delivered.close()
                self.release(session, shard)
            else:
                outcome.set_result(delivered)

        self.demand(session, shard, deliver)
        return await outcome

    def release(self, session: int, shard: int) -> None:
        """The session gives back one lease of a shard.

        Raises:
            ProtocolError: It has none.
        """
        state = self._sessions[session]
        # A release does not say which lease it ends. A copy in memory goes first: to take a blob for released that is
        # still open would let it be evicted, and its bytes would be missing from the quota.
        if self._memory.release(session, shard):
            return
        if state.leases[shard] > 0:
            state.leases[shard] -= 1
            self._tell(events.Released(session=session, shard=shard))
            if self._fetcher.drops_behind:
                self._let_go(state.dataset.shards[shard].key)
        else:
            raise ProtocolError(f"shard {shard} was released more often than it was leased")

    def _let_go(self, key: bytes) -> None:
        """Drop a shard's pages unless somebody reads it or waits for it."""
        if self._waits.of(key):
            return
        for state in self._sessions.values():
            place = state.dataset.place(key)
            if place is not None and state.leases[place] > 0:
                return
        self.spawn(self._fetcher.let_go(key))

    def _demand(self, wait: Wait) -> None:
        request = next(self._numbers)
        self._waits.add(request, wait)
        self._tell(events.Demanded(session=wait.session, request=request, shard=wait.shard))

    def _tell(self, event: events.Event | None) -> None:
        # Carrying out an effect may close a connection, and that is an event of its own: it has to wait its turn.
        self._events.append(event)
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._events:
                next_event = self._events.popleft()
                if isinstance(next_event, events.Dropped):
                    self._count_leftovers()
                now_s = self._loop.time()
                planner = self._planner
                self._carry_out_all(planner.wake(now_s) if next_event is None else planner.handle(next_event, now_s))
        finally:
            self._is_telling = False
        self._set_alarm()

    def _set_alarm(self) -> None:
        at_s = self._planner.wake_at_s
        if at_s == self._alarm_s:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(at_s, self._wake) if at_s is not None else None
        self._alarm_s = at_s

    def _wake(self) -> None:
        self._alarm = self._alarm_s = None
        self._tell(None)

    def _carry_out_all(self, wanted: Iterable[effects.Effect]) -> None:
        for effect in wanted:
            match effect:
                case effects.Fetch():
                    self._grants.fetched_anew(effect.key)
                    self._fetches.start(effect.key, is_demand=effect.demand)
                case effects.Promote():
                    self._fetcher.promote(effect.key)
                case effects.Evict():
                    self.spawn(self._evict(effect.key))
                case effects.Grant():
                    wait = self._waits.take(effect.session, effect.request)
                    if wait is not None:
                        self._sessions[wait.session].leases[wait.shard] += 1
                        self.spawn(self._grants.grant(effect, wait))
                case effects.ServeFromMemory():
                    wait = self._waits.take(effect.session, effect.request)
                    if wait is not None:
                        self._serve_from_memory(wait)
                case effects.Refuse():
                    wait = self._waits.take(effect.session, effect.request)
                    if wait is not None:
                        wait.answer(self._fetches.refusal(wait))
                case _:
                    assert_never(effect)

    def _serve_from_memory(self, wait: Wait) -> None:
        self._memory.serve(wait)
        # A disk that took nothing may do so again, and only who looks finds out.
        self.measure_overhead()

    def _fetched(self, event: events.Event) -> None:
        self._tell(event)
        self.measure_overhead()

    def measure_overhead(self) -> None:
        """Learn what the directory holds besides blobs, if that was not done just now."""
        now_s = self._loop.time()
        if now_s - self._measured_s >= MEASURE_INTERVAL_S:
            self._measured_s = now_s
            self.spawn(self._measure())

    async def _measure(self) -> None:
        survey = await self._fetcher.survey()
        self._overhead_bytes = survey.overhead_bytes
        self._planner.set_room(survey.limit_bytes, takes_shards=survey.takes_shards)
        self._count_leftovers()
        self._tell(None)

    def _count_leftovers(self) -> None:
        """A damaged blob that is kept counts before the planner hears that it is no longer one."""
        self._planner.set_overhead(self._overhead_bytes + self._fetcher.leftover_bytes)

    def vanished(self, keys: Iterable[bytes]) -> None:
        """Blobs are gone that nobody asked for: found damaged by the scrub, or their disk is gone."""
        for key in keys:
            # Who found it at the same time as a reader may come second, and then it may even be there again.
            if self._planner.is_resident(key) and not self._fetcher.has(key) and self._grants.note_lost(key):
                self._tell(events.Dropped(key=key))
        self.measure_overhead()

    async def _evict(self, key: bytes) -> None:
        try:
            await self._fetcher.evict(key)
        except DiskTrouble as error:
            # The planner goes on as if it were gone: a disk that cannot unlink takes no new blobs either, and what is
            # really there is counted when the store is opened next.
            log.warning("blob %s cannot be dropped: %s", key.hex(), error)
            self.account.disk_failed(self._loop.time())
        self._tell(events.Dropped(key=key))


async def _guarded(work: Coroutine[None, None, None]) -> None:
    """A defect in one task ends that task and not the daemon."""
    try:
        await work
    except Exception:
        log.exception("a task met a defect")
