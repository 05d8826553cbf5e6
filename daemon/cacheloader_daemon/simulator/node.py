"""The node: the planner is told what the models do, and the models do what it wants."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, assert_never

import numpy as np

from cacheloader_daemon.plan import effects, events
from cacheloader_daemon.plan.machine import Planner
from cacheloader_daemon.plan.options import PlannerOptions
from cacheloader_daemon.simulator.job import JobOrder
from cacheloader_daemon.simulator.origin import ModelOrigin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheloader_daemon.simulator.settings import Settings


@dataclass(slots=True, kw_only=True)
class Rank:
    """One session.

    Attributes:
        session: Its number.
        number: Its rank.
        window: The window that it reads, -1 before the first one of an epoch.
        wanted: Shards of the window that it has not got, in the order in which it asks for them.
        held: Its leases, oldest first: window, shard, and whether the shard came past the cache.
    """

    session: int
    number: int
    window: int = -1
    wanted: deque[int] = field(default_factory=deque)
    held: deque[tuple[int, int, bool]] = field(default_factory=deque)


@dataclass(slots=True, kw_only=True)
class Job:
    """Ranks that step together.

    Attributes:
        order: What they read.
        ranks: They.
        epoch: Where they stand.
        row: Rows of the epoch behind them.
        step_ends_s: When the step under way is over; infinite while a rank waits.
        ends: Of each epoch that is over, when it was.
    """

    order: JobOrder
    ranks: list[Rank]
    epoch: int = 0
    row: int = 0
    step_ends_s: float = inf
    ends: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What had happened when a job finished an epoch.

    Attributes:
        job: Which.
        at_s: When.
        sent_bytes: What the origin had sent.
        written_bytes: What had been written to disk.
        num_requests: What had been asked of the origin.
        read_bytes: What all jobs had read.
    """

    job: int
    at_s: float
    sent_bytes: int
    written_bytes: int
    num_requests: int
    read_bytes: int


class SimulatedNode:
    """Runs the jobs to their end.

    Args:
        settings: What is simulated.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._now_s = 0.0
        self._origin = ModelOrigin(settings, np.random.default_rng([settings.seed, 0]))
        self._shards = [
            events.ShardRef(
                key=_key(shard, settings.seed), reserve_bytes=settings.reserve_bytes or settings.shard_bytes
            )
            for shard in range(settings.num_shards)
        ]
        self._number = {ref.key: shard for shard, ref in enumerate(self._shards)}
        self.planner = Planner(
            PlannerOptions(
                quota_bytes=settings.cache_bytes,
                max_fetches=settings.max_fetches,
                lookahead_bytes=None if settings.lookahead_bytes < 0 else settings.lookahead_bytes,
                eviction=settings.eviction,
            ),
            overhead_bytes=settings.overhead_bytes,
        )
        self._events: deque[events.Event | None] = deque()
        self._is_telling = False
        self._requests = 0
        self._asking: dict[tuple[int, int], tuple[Job, Rank, int]] = {}
        """By session and request: who waits for which shard."""
        self._written_bytes = self._read_bytes = 0
        self.jobs = [
            Job(
                order=JobOrder(settings, settings.seed + 1 + number),
                ranks=[
                    Rank(session=number * settings.num_ranks + rank, number=rank) for rank in range(settings.num_ranks)
                ],
            )
            for number in range(settings.num_jobs)
        ]

    def run(self) -> Iterator[Moment]:
        """Let time pass until the last job has finished its last epoch; yields at each end of an epoch."""
        for job in self.jobs:
            for rank in job.ranks:
                self._tell(events.SessionOpened(session=rank.session, shards=self._shards))
        for job in self.jobs:
            self._begin_epoch(job)
        while any(job.epoch < self._settings.num_epochs for job in self.jobs):
            wake_s = self.planner.wake_at_s
            step_s = min(job.step_ends_s for job in self.jobs)
            next_s = min(step_s, self._origin.next_s, inf if wake_s is None else wake_s)
            assert next_s < inf, "everybody waits for ever"
            self._now_s = max(self._now_s, next_s)
            for arrived in self._origin.advance(self._now_s):
                self._arrived(arrived)
            if wake_s is not None and wake_s <= self._now_s:
                self._tell(None)
            for number, job in enumerate(self.jobs):
                if job.step_ends_s <= self._now_s and self._end_step(job):
                    yield Moment(
                        job=number,
                        at_s=self._now_s,
                        sent_bytes=self._origin.sent_bytes,
                        written_bytes=self._written_bytes,
                        num_requests=self._origin.num_requests,
                        read_bytes=self._read_bytes,
                    )

    def _begin_epoch(self, job: Job) -> None:
        for rank in job.ranks:
            plans = [job.order.plan(rank.number, epoch) for epoch in (job.epoch, job.epoch + 1)]
            clocks = [(job.epoch + later) * job.order.rows_per_epoch for later in range(2)]
            pairs = list(zip(plans, clocks, strict=True))
            rank.window = -1
            self._tell(
                events.PlanFollowed(
                    session=rank.session,
                    first_clock=np.concatenate([plan.first_row + clock for plan, clock in pairs]),
                    stop_clock=np.concatenate([plan.stop_row + clock for plan, clock in pairs]),
                    shard=np.concatenate([plan.shards for plan, _ in pairs]),
                    clock=clocks[0],
                )
            )
        self._begin_step(job)

    def _begin_step(self, job: Job) -> None:
        for rank in job.ranks:
            plan = job.order.plan(rank.number, job.epoch)
            if job.row >= plan.num_rows:
                continue
            # A batch that crosses into the next window needs both.
            last_row = min(job.row + self._settings.batch_size, plan.num_rows) - 1
            while rank.window < plan.window_of(last_row):
                rank.window += 1
                rank.wanted.extend(plan.shards_of(rank.window))
        for rank in job.ranks:
            self._ask(job, rank)
        self._go_on(job)

    def _ask(self, job: Job, rank: Rank) -> None:
        """One shard after the other, as a worker reads them."""
        if rank.wanted:
            self._requests += 1
            self._asking[rank.session, self._requests] = job, rank, rank.wanted[0]
            self._tell(events.Demanded(session=rank.session, request=self._requests, shard=rank.wanted[0]))

    def _go_on(self, job: Job) -> None:
        if job.step_ends_s == inf and not any(rank.wanted for rank in job.ranks):
            # Each rank reads its share of the samples.
            rows_per_s = self._settings.samples_per_s / self._settings.num_ranks
            rows = min(self._settings.batch_size, job.order.rows_per_epoch - job.row)
            job.step_ends_s = self._now_s + rows / rows_per_s

    def _end_step(self, job: Job) -> bool:
        """Whether that was the epoch's last step."""
        job.step_ends_s = inf
        job.row = min(job.row + self._settings.batch_size, job.order.rows_per_epoch)
        is_over = job.row == job.order.rows_per_epoch
        for rank in job.ranks:
            plan = job.order.plan(rank.number, job.epoch)
            window = plan.window_of(job.row)
            while rank.held and (rank.held[0][0] < window or is_over):
                _, shard, is_borrowed = rank.held.popleft()
                self._read_bytes += self._settings.shard_bytes
                if not is_borrowed:
                    self._tell(events.Released(session=rank.session, shard=shard))
            self._tell(events.Advanced(session=rank.session, clock=job.epoch * job.order.rows_per_epoch + job.row))
        if not is_over:
            self._begin_step(job)
            return False
        job.ends.append(self._now_s)
        job.epoch += 1
        job.row = 0
        if job.epoch < self._settings.num_epochs:
            self._begin_epoch(job)
        return True

    def _tell(self, event: events.Event | None) -> None:
        # As in the runtime: what an effect brings about waits until the effects before it are carried out.
        self._events.append(event)
        if self._is_telling:
            return
        self._is_telling = True
        while self._events:
            told = self._events.popleft()
            planner, now_s = self.planner, self._now_s
            self._carry_out(planner.wake(now_s) if told is None else planner.handle(told, now_s))
        self._is_telling = False

    def _carry_out(self, wanted: list[effects.Effect]) -> None:
        for effect in wanted:
            match effect:
                case effects.Fetch():
                    self._origin.ask(effect.key, self._now_s)
                case effects.ServeFromMemory():
                    self._origin.ask((effect.session, effect.request), self._now_s)
                case effects.Evict():
                    self._tell(events.Dropped(key=effect.key))
                case effects.Grant():
                    self._got(effect.session, effect.request, is_borrowed=False)
                case effects.Promote():
                    pass  # the link is shared evenly
                case effects.Refuse():
                    raise AssertionError("nothing fails here")
                case _:
                    assert_never(effect)

    def _arrived(self, arrived: object) -> None:
        if isinstance(arrived, bytes):
            self._written_bytes += self._settings.shard_bytes
            self._tell(events.FetchFinished(key=arrived, used_bytes=self._settings.shard_bytes))
        else:
            assert isinstance(arrived, tuple)
            self._got(*arrived, is_borrowed=True)

    def _got(self, session: int, request: int, *, is_borrowed: bool) -> None:
        job, rank, shard = self._asking.pop((session, request))
        assert rank.wanted.popleft() == shard
        rank.held.append((rank.window, shard, is_borrowed))
        self._ask(job, rank)
        self._go_on(job)


def _key(shard: int, seed: int) -> bytes:
    return np.random.default_rng([seed, 1, shard]).bytes(16)
