"""Where everything meets: what happens becomes an event of the planner, and what the planner wants is done.

All events pass through ``_tell``, on the loop's thread, one after the other. Effects that take time run as tasks and
end in another event. Nothing here decides what to fetch, keep or drop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, assert_never

from cacheloader.errors import (
    CacheloaderError,
    DaemonError,
    DatasetError,
    OriginDenied,
    ProtocolError,
    QuotaTooSmall,
    masked_urls,
)
from cacheloader_daemon.plan import effects, events
from cacheloader_daemon.store import BlobLost, DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator

    from cacheloader.origin.base import Origin
    from cacheloader.protocol.plans import Accesses
    from cacheloader_daemon.account import Account
    from cacheloader_daemon.fetch import Fetcher
    from cacheloader_daemon.lease import ShardLease
    from cacheloader_daemon.plan.machine import Planner
    from cacheloader_daemon.plan.options import PlannerStatistics
    from cacheloader_daemon.shards import Dataset, ShardSource

    Deliver = Callable[["ShardLease | CacheloaderError"], None]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_ATTEMPTS = 3
"""Times that one request may find its blob gone from the disk before it is served past it."""

MEASURE_INTERVAL_S = 1.0
"""How often the directory's overhead is measured while shards arrive; the store overstates it for the time between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """One session at one moment.

    Attributes:
        uri: First shard of its data set, without what is secret in a URL.
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
    key: bytes
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
        # ``None`` stands for the passing of time alone.
        self._events: deque[events.Event | None] = deque()
        self._is_telling = False
        self._sessions: dict[int, _Session] = {}
        self._waits: dict[tuple[int, int], _Wait] = {}
        # The same by shard: a fetch for those who wait is made with the credentials of one of them.
        self._waits_of: defaultdict[bytes, dict[tuple[int, int], _Wait]] = defaultdict(dict)
        self._memory_waits: dict[bytes, list[_Wait]] = {}
        self._numbers = itertools.count(1)
        self._last_errors: dict[bytes, CacheloaderError] = {}
        # Blobs that one grant found gone, while others of them may still be on their way.
        self._lost: set[bytes] = set()
        self._measured_s = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s: float | None = None

    def session_records(self) -> list[SessionRecord]:
        """What each session reads, scans included."""
        waiting = Counter(session for session, _ in self._waits)
        return [
            SessionRecord(
                uri=masked_urls(state.dataset.manifest.uri(0)) if len(state.dataset.manifest) else "",
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
            self._take_wait(*name)
        if not self._sessions:
            self._lost.clear()
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
        key = self._sessions[session].dataset.shards[shard].key
        self._demand(_Wait(session=session, shard=shard, key=key, deliver=deliver))

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
        name = wait.session, request
        self._waits[name] = self._waits_of[wait.key][name] = wait
        self._tell(events.Demanded(session=wait.session, request=request, shard=wait.shard))

    def _take_wait(self, session: int, request: int) -> _Wait | None:
        wait = self._waits.pop((session, request), None)
        if wait is not None:
            others = self._waits_of[wait.key]
            del others[session, request]
            if not others:
                del self._waits_of[wait.key]
        return wait

    def _tell(self, event: events.Event | None) -> None:
        # Carrying out an effect may close a connection, and that is an event of its own: it has to wait its turn.
        self._events.append(event)
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._events:
                next_event = self._events.popleft()
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
                    self._lost.discard(effect.key)
                    self.spawn(self._fetch(effect.key, is_demand=effect.demand))
                case effects.Promote():
                    self._fetcher.promote(effect.key)
                case effects.Evict():
                    self.spawn(self._evict(effect.key))
                case effects.Grant():
                    wait = self._take_wait(effect.session, effect.request)
                    if wait is not None:
                        self._sessions[wait.session].counted[wait.shard] += 1
                        self.spawn(self._grant(effect, wait))
                case effects.ServeFromMemory():
                    wait = self._take_wait(effect.session, effect.request)
                    if wait is not None:
                        self._serve_from_memory(wait)
                case effects.Refuse():
                    wait = self._take_wait(effect.session, effect.request)
                    if wait is not None:
                        _deliver(wait, self._refusal(effect.key, wait))
                case _:
                    assert_never(effect)

    def _sources(self, key: bytes, waiting: Iterable[_Wait]) -> Iterator[ShardSource]:
        """Ways to bring a shard: with the credentials of those who wait for it, the longest first, then the newest."""
        sessions = [self._sessions[wait.session] for wait in waiting if wait.session in self._sessions]
        for session in itertools.chain(sessions, reversed(self._sessions.values())):
            source = session.dataset.source(key)
            if source is not None:
                yield source

    async def _bring(
        self,
        key: bytes,
        waiting: Callable[[], Iterable[_Wait]],
        bring: Callable[[ShardSource], Awaitable[_T]],
    ) -> tuple[ShardSource, _T]:
        """What ``bring`` returns for the first source that is not denied, and that source.

        Raises:
            CacheloaderError: No source brought it.
            DiskTrouble: As ``bring`` raises it.
        """
        denied: OriginDenied | None = None
        tried: list[Origin] = []
        while True:
            # Looked up anew each time: sessions come and go meanwhile.
            sources = self._sources(key, waiting())
            source = next((source for source in sources if not any(source.origin is one for one in tried)), None)
            if source is None:
                raise denied or DaemonError("the sessions that wanted the shard have ended")
            try:
                return source, await bring(source)
            except DiskTrouble as error:
                log.warning("%s is not cached: %s", source.info.uri, error)
                raise
            except OriginDenied as error:
                # Another session may have the rights, or the fresh credentials, that this one lacks.
                self._note_failure(error, source)
                tried.append(source.origin)
                denied = denied or error
            except CacheloaderError as error:
                self._note_failure(error, source)
                raise
            except Exception as error:
                # The outer edge of a task: whatever happened, those who wait for the shard have to hear of it.
                log.exception("fetching %s met a defect", source.info.uri)
                defect = DaemonError(
                    f"{source.info.uri} met a defect of the daemon ({error!r}); its log has the traceback",
                    uri=source.info.uri,
                )
                self.account.fetch_failures[type(defect).__name__] += 1
                raise defect from error

    def _note_failure(self, error: CacheloaderError, source: ShardSource) -> None:
        log.warning("%s could not be fetched: %s", source.info.uri, error)
        self.account.fetch_failures[type(error).__name__] += 1

    def _refusal(self, key: bytes, wait: _Wait) -> CacheloaderError:
        error = self._last_errors.get(key)
        if error is not None:
            return error
        uri = self._sessions[wait.session].dataset.manifest.uri(wait.shard)
        return DaemonError(f"{uri} could not be fetched; the daemon's log says why", uri=uri)

    async def _fetch(self, key: bytes, *, is_demand: bool) -> None:
        event: events.Event
        started_s = self._loop.time()

        def waiting() -> Iterable[_Wait]:
            return list(self._waits_of.get(key, {}).values())

        def into_store(source: ShardSource) -> Awaitable[int]:
            # Somebody may have come to wait for it since it was ordered, or since the last try.
            return self._fetcher.into_store(source, is_demand=is_demand or key in self._waits_of)

        try:
            source, used_bytes = await self._bring(key, waiting, into_store)
        except DiskTrouble:
            self.account.disk_failed(self._loop.time())
            event = events.FetchFailed(key=key, disk=True)
        except CacheloaderError as error:
            self._last_errors[key] = error
            event = events.FetchFailed(key=key, disk=False)
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

    async def _grant(self, effect: effects.Grant, wait: _Wait) -> None:
        try:
            lease = await self._fetcher.lease(effect.key, source="nvme" if effect.hit else "origin")
        except BlobLost:
            self._replace_lost(wait)
        except DiskTrouble as error:
            self.account.disk_failed(self._loop.time())
            log.warning("blob %s cannot be opened: %s", effect.key.hex(), error)
            if self._take_back(wait):
                self._serve_from_memory(wait)
        except Exception as error:
            # The outer edge of a task: who waits has to hear of it.
            log.exception("opening blob %s met a defect", effect.key.hex())
            if self._take_back(wait):
                _deliver(wait, DaemonError(f"the daemon met a defect ({error!r}); its log has the traceback"))
        else:
            self._hand_out(lease, wait, is_counted=True)

    def _take_back(self, wait: _Wait) -> bool:
        """Undo a grant that cannot be honoured; whether its session is still there."""
        state = self._sessions.get(wait.session)
        if state is None:
            return False
        state.counted[wait.shard] -= 1
        self._tell(events.Released(session=wait.session, shard=wait.shard))
        return True

    def _replace_lost(self, wait: _Wait) -> None:
        """The blob behind a grant is gone or damaged: ask anew."""
        if wait.session not in self._sessions:
            return  # its lease ended with it, and the planner may have let the blob go since
        # Told before the lease ends: a blob without leases that nobody knows to be gone may be chosen for eviction, and
        # then its end would be told twice. Others may find the same blob gone; it is dropped once.
        if wait.key not in self._lost:
            self._lost.add(wait.key)
            self._tell(events.Dropped(key=wait.key))
        self._take_back(wait)
        wait.attempts += 1
        if wait.attempts < MAX_ATTEMPTS:
            self._demand(wait)
        else:
            self._serve_from_memory(wait)

    def _serve_from_memory(self, wait: _Wait) -> None:
        waiting = self._memory_waits.get(wait.key)
        if waiting is not None:
            waiting.append(wait)
            return
        self._memory_waits[wait.key] = [wait]
        self.spawn(self._fetch_into_memory(wait.key))

    async def _fetch_into_memory(self, key: bytes) -> None:
        lease: ShardLease | None = None
        error: CacheloaderError = DaemonError("the daemon is leaving")
        try:
            source, lease = await self._bring(key, lambda: list(self._memory_waits[key]), self._fetcher.into_memory)
            self.account.remote_read_bytes["bypass"] += source.info.size_bytes
        except CacheloaderError as failure:
            error = failure
        except DiskTrouble as failure:
            error = DaemonError(f"the shard could be brought neither to disk nor to memory: {failure}")
        finally:
            waiting = self._memory_waits.pop(key)
        try:
            for wait in waiting:
                if wait.session in self._sessions:
                    self._share(lease, error, wait)
        finally:
            if lease is not None:
                lease.close()

    def _share(self, lease: ShardLease | None, error: CacheloaderError, wait: _Wait) -> None:
        """Answer one of those who wait for a shard in memory, whatever becomes of the others."""
        if lease is None:
            _deliver(wait, error)
            return
        try:
            own = lease.duplicate()
        except OSError as failure:
            _deliver(wait, DaemonError(f"the daemon has no descriptor left for a shard ({failure}); raise its limit"))
            return
        self._hand_out(own, wait, is_counted=False)

    def _hand_out(self, lease: ShardLease, wait: _Wait, *, is_counted: bool) -> None:
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
            _deliver(wait, error)
            return
        if not is_counted:
            state.uncounted[wait.shard] += 1
        _deliver(wait, lease)


def _deliver(wait: _Wait, outcome: ShardLease | CacheloaderError) -> None:
    """Answer one who waits; a defect met on the way is not the others'."""
    try:
        wait.deliver(outcome)
    except Exception:
        log.exception("an answer met a defect")


async def _guarded(work: Coroutine[None, None, None]) -> None:
    """A defect in one task ends that task and not the daemon."""
    try:
        await work
    except Exception:
        log.exception("a task met a defect")
