"""Where everything meets: what happens becomes an event of the planner, and what the planner wants is done.

All events pass through ``_tell``, on the loop's thread, one after the other. Effects that take time run as tasks and
end in another event. Nothing here decides what to fetch, keep or drop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from cacheloader.errors import CacheloaderError, DaemonError, DatasetError, ProtocolError, QuotaTooSmall
from cacheloader_daemon.plan import effects, events
from cacheloader_daemon.store import BlobLost, DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from cacheloader_daemon.accesses import Accesses
    from cacheloader_daemon.account import Account
    from cacheloader_daemon.fetch import Fetcher
    from cacheloader_daemon.lease import ShardLease
    from cacheloader_daemon.plan.machine import Planner
    from cacheloader_daemon.plan.options import PlannerStatistics
    from cacheloader_daemon.shards import Dataset, ShardSource

    Deliver = Callable[["ShardLease | CacheloaderError"], None]

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Times that one request may find its blob gone from the disk before it is served past it."""

MEASURE_INTERVAL_S = 1.0
"""How often the directory's overhead is measured while shards arrive; the store overstates it for the time between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """One session at one moment.

    Attributes:
        uri: First shard of its data set.
        num_shards: Shards of it.
        total_bytes: Their bytes.
        leases: Leases that it holds.
        waiting: Shards that it waits for.
    """

    uri: str
    num_shards: int
    total_bytes: int
    leases: int
    waiting: int


@dataclass(slots=True, kw_only=True)
class _Wait:
    session: int
    shard: int
    deliver: Deliver
    attempts: int = 0


@dataclass(slots=True, kw_only=True)
class _Session:
    dataset: Dataset
    # Leases by shard: those that the planner counts, and those of shards in memory, which it does not know.
    counted: Counter[int] = field(default_factory=Counter)
    uncounted: Counter[int] = field(default_factory=Counter)


class Runtime:
    """Carries out the planner's effects. All methods belong to the loop's thread.

    Args:
        planner: Decides; told of everything here and nowhere else.
        fetcher: Brings shards, opens and drops blobs.
        account: Counts.
        tasks: Owner of every task; it has to be entered already.
    """

    def __init__(self, *, planner: Planner, fetcher: Fetcher, account: Account, tasks: asyncio.TaskGroup) -> None:
        self.account = account
        self._planner = planner
        self._fetcher = fetcher
        self._group = tasks
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: deque[events.Event] = deque()
        self._is_telling = False
        self._sessions: dict[int, _Session] = {}
        self._waits: dict[tuple[int, int], _Wait] = {}
        self._memory_waits: dict[bytes, list[_Wait]] = {}
        self._numbers = itertools.count(1)
        self._last_errors: dict[bytes, CacheloaderError] = {}
        self._losses: Counter[bytes] = Counter()
        self._measured_s = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s: float | None = None

    @property
    def num_sessions(self) -> int:
        """Open sessions, those of scans included."""
        return len(self._sessions)

    def session_records(self) -> list[SessionRecord]:
        """What each session reads, scans included."""
        waiting = Counter(session for session, _ in self._waits)
        return [
            SessionRecord(
                uri=state.dataset.manifest.uri(0) if len(state.dataset.manifest) else "",
                num_shards=len(state.dataset.manifest),
                total_bytes=state.dataset.manifest.total_bytes,
                leases=state.counted.total() + state.uncounted.total(),
                waiting=waiting[session],
            )
            for session, state in self._sessions.items()
        ]

    def plan_statistics(self) -> PlannerStatistics:
        """What the planner knows."""
        return self._planner.statistics()

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
        for task in list(self._tasks):
            task.cancel()

    def open_session(self, dataset: Dataset) -> int:
        """A number for a new session that reads ``dataset``."""
        session = next(self._numbers)
        self._sessions[session] = _Session(dataset=dataset)
        self._tell(events.SessionOpened(session=session, shards=dataset.shards))
        return session

    def close_session(self, session: int) -> None:
        """The session's plan, waits and leases end."""
        del self._sessions[session]
        for name in [name for name in self._waits if name[0] == session]:
            del self._waits[name]
        self._tell(events.SessionClosed(session=session))

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
        if not needed.fits:
            raise QuotaTooSmall(needed.shortfall)
        self._tell(plan)

    def advance(self, session: int, clock: int) -> None:
        """The session has finished with every row before ``clock``."""
        self._tell(events.Advanced(session=session, clock=clock))

    def demand(self, session: int, shard: int, deliver: Deliver) -> None:
        """Ask for a lease of a shard; ``deliver`` gets it, or an error, once, unless the session ends before."""
        self._demand(_Wait(session=session, shard=shard, deliver=deliver))

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
        if state.uncounted[shard] > 0:
            state.uncounted[shard] -= 1
        elif state.counted[shard] > 0:
            state.counted[shard] -= 1
            self._tell(events.Released(session=session, shard=shard))
        else:
            raise ProtocolError(f"shard {shard} was released more often than it was leased")

    def _demand(self, wait: _Wait) -> None:
        request = next(self._numbers)
        self._waits[wait.session, request] = wait
        self._tell(events.Demanded(session=wait.session, request=request, shard=wait.shard))

    def _tell(self, event: events.Event) -> None:
        # Carrying out an effect may close a connection, and that is an event of its own: it has to wait its turn.
        self._events.append(event)
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._events:
                self._carry_out_all(self._planner.handle(self._events.popleft(), self._loop.time()))
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
        self._carry_out_all(self._planner.wake(self._loop.time()))
        self._set_alarm()

    def _carry_out_all(self, wanted: Iterable[effects.Effect]) -> None:
        for effect in wanted:
            match effect:
                case effects.Fetch():
                    self.spawn(self._fetch(effect.key, self._source(effect.key), is_demand=effect.demand))
                case effects.Promote():
                    self._fetcher.promote(effect.key)
                case effects.Evict():
                    self.spawn(self._evict(effect.key))
                case effects.Grant():
                    wait = self._waits.pop((effect.session, effect.request), None)
                    if wait is not None:
                        self._sessions[wait.session].counted[wait.shard] += 1
                        self.spawn(self._grant(effect, wait, num_losses=self._losses[effect.key]))
                case effects.ServeFromMemory():
                    wait = self._waits.pop((effect.session, effect.request), None)
                    if wait is not None:
                        self._serve_from_memory(effect.key, wait)
                case effects.Refuse():
                    wait = self._waits.pop((effect.session, effect.request), None)
                    if wait is not None:
                        wait.deliver(self._refusal(effect.key, wait))
                case _:
                    assert_never(effect)

    def _source(self, key: bytes) -> ShardSource | None:
        """How to bring a shard; ``None`` if the sessions that wanted it have just gone."""
        for dataset in {session.dataset for session in self._sessions.values()}:
            source = dataset.source(key)
            if source is not None:
                return source
        return None

    def _refusal(self, key: bytes, wait: _Wait) -> CacheloaderError:
        error = self._last_errors.get(key)
        if error is not None:
            return error
        uri = self._sessions[wait.session].dataset.manifest.uri(wait.shard)
        return DaemonError(f"{uri} could not be fetched; the daemon's log says why", uri=uri)

    async def _fetch(self, key: bytes, source: ShardSource | None, *, is_demand: bool) -> None:
        event: events.Event = events.FetchFailed(key=key, disk=False)
        started_s = self._loop.time()
        if source is not None:
            try:
                used_bytes = await self._fetcher.into_store(source, is_demand=is_demand)
            except DiskTrouble as error:
                log.warning("%s is not cached: %s", source.info.uri, error)
                self.account.disk_failed(self._loop.time())
                event = events.FetchFailed(key=key, disk=True)
            except Exception as error:  # noqa: BLE001
                # The outer edge of a task: whatever happened, those who wait for the shard have to hear of it.
                self._last_errors[key] = self._explained(error, source)
            else:
                self.account.shard_fetch_s.add(self._loop.time() - started_s)
                self.account.remote_read_bytes["demand" if is_demand else "prefetch"] += source.info.size_bytes
                event = events.FetchFinished(key=key, used_bytes=used_bytes)
        self._tell(event)
        self._last_errors.pop(key, None)
        self.measure_overhead()

    def measure_overhead(self) -> None:
        """Learn what the directory holds besides blobs, if that was not done just now."""
        now_s = self._loop.time()
        if now_s - self._measured_s >= MEASURE_INTERVAL_S:
            self._measured_s = now_s
            self.spawn(self._measure())

    async def _measure(self) -> None:
        try:
            self._planner.set_overhead(await self._fetcher.overhead_bytes())
        except DiskTrouble as error:
            log.warning("the cache directory cannot be measured: %s", error)

    async def _evict(self, key: bytes) -> None:
        try:
            await self._fetcher.evict(key)
        except DiskTrouble as error:
            # The planner goes on as if it were gone: a disk that cannot unlink takes no new blobs either, and what is
            # really there is counted when the store is opened next.
            log.warning("blob %s cannot be dropped: %s", key.hex(), error)
            self.account.disk_failed(self._loop.time())
        self._tell(events.Dropped(key=key))

    async def _grant(self, effect: effects.Grant, wait: _Wait, *, num_losses: int) -> None:
        key = effect.key
        try:
            lease = await self._fetcher.lease(key, source="nvme" if effect.hit else "origin")
        except BlobLost:
            if self._take_back(wait):
                self._replace_lost(key, wait, num_losses)
        except DiskTrouble as error:
            self.account.disk_failed(self._loop.time())
            log.warning("blob %s cannot be opened: %s", key.hex(), error)
            if self._take_back(wait):
                self._serve_from_memory(key, wait)
        else:
            self._deliver(lease, wait, is_counted=True)

    def _take_back(self, wait: _Wait) -> bool:
        """Undo a grant that cannot be honoured; whether its session is still there."""
        state = self._sessions.get(wait.session)
        if state is None:
            return False
        state.counted[wait.shard] -= 1
        self._tell(events.Released(session=wait.session, shard=wait.shard))
        return True

    def _replace_lost(self, key: bytes, wait: _Wait, num_losses: int) -> None:
        """The blob behind a grant is gone or damaged: ask anew."""
        if self._losses[key] == num_losses:
            # Others may find the same blob gone; it is dropped once.
            self._losses[key] += 1
            self._tell(events.Dropped(key=key))
        wait.attempts += 1
        if wait.attempts < MAX_ATTEMPTS:
            self._demand(wait)
        else:
            self._serve_from_memory(key, wait)

    def _serve_from_memory(self, key: bytes, wait: _Wait) -> None:
        waiting = self._memory_waits.get(key)
        if waiting is not None:
            waiting.append(wait)
            return
        self._memory_waits[key] = [wait]
        self.spawn(self._fetch_into_memory(key, self._source(key)))

    async def _fetch_into_memory(self, key: bytes, source: ShardSource | None) -> None:
        lease: ShardLease | None = None
        error: CacheloaderError = DaemonError("the session ended")
        try:
            if source is not None:
                lease = await self._fetcher.into_memory(source)
                self.account.remote_read_bytes["bypass"] += source.info.size_bytes
        except Exception as failure:  # noqa: BLE001
            # The outer edge of a task, as in ``_fetch``.
            assert source is not None
            error = self._explained(failure, source)
        finally:
            waiting = self._memory_waits.pop(key)
        for wait in waiting:
            if lease is not None:
                self._deliver(lease.duplicate(), wait, is_counted=False)
            elif wait.session in self._sessions:
                wait.deliver(error)
        if lease is not None:
            lease.close()

    def _deliver(self, lease: ShardLease, wait: _Wait, *, is_counted: bool) -> None:
        state = self._sessions.get(wait.session)
        if state is None:
            lease.close()
            return
        try:
            state.dataset.check_count(wait.shard, lease.index_head)
        except DatasetError as error:
            lease.close()
            if is_counted:
                self._take_back(wait)
            wait.deliver(error)
            return
        if not is_counted:
            state.uncounted[wait.shard] += 1
        wait.deliver(lease)

    def _explained(self, error: Exception, source: ShardSource) -> CacheloaderError:
        if not isinstance(error, CacheloaderError):
            log.error("fetching %s met a defect", source.info.uri, exc_info=error)
            error = DaemonError(
                f"{source.info.uri} met a defect of the daemon ({error!r}); its log has the traceback",
                uri=source.info.uri,
            )
        self.account.fetch_failures[type(error).__name__] += 1
        return error


async def _guarded(work: Coroutine[None, None, None]) -> None:
    """A defect in one task ends that task and not the daemon."""
    try:
        await work
    except Exception:
        log.exception("a task met a defect")
