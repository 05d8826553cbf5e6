"""The one budget of bytes and requests that all transfers of a process share."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from cacheloader.errors import ConfigError
from cacheloader.origin.hedge import SHARE, Hedges
from cacheloader.origin.retry import Backoff, HostPace
from cacheloader.origin.width import WidthSearch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from cacheloader.origin.hedge import HedgeStatistics


ALONE_S = 2.0
"""How long a host serves the transfer that found it idle before others ahead of time join in. By then a shard of 64 MiB
has come over a link of 300 Mbit/s; longer, one answer that is late would keep the link from all others. A guess."""


@dataclass(slots=True, kw_only=True, eq=False)
class Urgency:
    """Whether somebody waits for a transfer. Changed while it runs, it moves what has not started to the front.

    Attributes:
        demanded: True for demand, False for prefetch.
        place: Which transfer this is, counted in the order in which they were ordered.
    """

    demanded: bool = False
    place: int = field(default_factory=itertools.count().__next__, init=False)


class SlotStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the slots are doing.

    Attributes:
        requests: Requests in flight.
        size_bytes: Bytes that they asked for and that are not yet written.
        waiting: Requests that wait for a slot.
        throttled_total: "Slow down" answers so far.
        hedges: Second requests so far.
    """

    requests: int
    size_bytes: int
    waiting: int
    throttled_total: int
    hedges: HedgeStatistics


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    host: str
    size_bytes: int
    urgency: Urgency
    granted: asyncio.Future[None]


class _Opener(msgspec.Struct, frozen=True, kw_only=True):
    """The transfer that a host was idle before, until when it is left alone, and whether it tells its end itself."""

    urgency: Urgency
    until_s: float
    is_announced: bool


class TransferSlots:
    """Grants requests: demand before prefetch, within each the transfer that began first, never more than the budget.

    So shards arrive one after the other, and not all together at the end. A host that was idle serves the transfer that
    comes first alone for a moment, which is what a job begins with; only what somebody waits for joins in at once. An
    announced one keeps it until what it brought can be used. Each host has a width of its own, which grows for as long
    as more requests bring more bytes, and a pace: after a "slow down" it gets half the requests, and none for a moment.

    Args:
        max_bytes: Bytes asked for and not yet written, over all requests. One larger request runs alone.
        max_requests: Requests in flight.
        backoff: How long a host is left alone after a "slow down".
        hedge_share: Requests that may be asked a second time because they are late, as a share of all.
        random_unit: Gives random numbers in [0, 1).

    Attributes:
        hedges: Asks a second time.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 256 * 2**20,
        max_requests: int = 32,
        backoff: Backoff | None = None,
        hedge_share: float = SHARE,
        random_unit: Callable[[], float] = random.random,
    ) -> None:
        if max_bytes < 1 or max_requests < 1:
            raise ConfigError(
                f"max_bytes={max_bytes}, max_requests={max_requests} allow no transfer; both must be 1 or more"
            )
        self.hedges = Hedges(share=hedge_share)
        self._max_bytes = max_bytes
        self._max_requests = max_requests
        self._backoff = backoff or Backoff()
        self._random_unit = random_unit
        self._waiters: list[_Waiter] = []
        self._bytes = 0
        self._in_flight: Counter[str] = Counter()
        self._paces: dict[str, HostPace] = {}
        self._widths: dict[str, WidthSearch] = {}
        self._openers: dict[str, _Opener] = {}
        self._requests: Counter[Urgency] = Counter()  # of each transfer, those that wait and those in flight
        self._throttled = 0
        self._timer: asyncio.TimerHandle | None = None

    def statistics(self) -> SlotStatistics:
        """What is going on now."""
        return SlotStatistics(
            requests=self._in_flight.total(),
            size_bytes=self._bytes,
            waiting=len(self._waiters),
            throttled_total=self._throttled,
            hedges=self.hedges.statistics(),
        )

    @contextmanager
    def announced(self, host: str, urgency: Urgency) -> Iterator[None]:
        """A transfer from before it asks until what it brought can be used.

        An idle host is kept for it before, though another one may be ready sooner, and until the end: what others
        bring would take from its last part the processors that the last bytes did not need.
        """
        self._begin(host, urgency, is_announced=True)
        try:
            yield
        finally:
            opener = self._openers.get(host)
            if opener is not None and opener.urgency is urgency:
                del self._openers[host]
                self._grant()

    def _begin(self, host: str, urgency: Urgency, *, is_announced: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        opener = self._openers.get(host)
        is_idle = not self._in_flight[host] and not any(waiter.host == host for waiter in self._waiters)
        if is_idle and (opener is None or opener.until_s <= now_s):
            self._openers[host] = _Opener(urgency=urgency, until_s=now_s + ALONE_S, is_announced=is_announced)

    @asynccontextmanager
    async def hold(self, host: str, *, size_bytes: int, urgency: Urgency) -> AsyncIterator[None]:
        """Wait for a slot for one request of ``size_bytes`` to ``host`` and keep it while inside.

        This wait has no deadline: it ends as soon as others finish. Each of their requests has one; writing what came
        has none, since a thread that writes cannot be called back, so a disk that hangs holds its slots until it moves.
        """
        granted = asyncio.get_running_loop().create_future()
        waiter = _Waiter(host=host, size_bytes=size_bytes, urgency=urgency, granted=granted)
        self._begin(host, urgency, is_announced=False)
        self._requests[urgency] += 1
        self._waiters.append(waiter)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._give_back(waiter)
            else:
                self._waiters.remove(waiter)
                self._end(waiter)
                self._grant()
            raise
        try:
            yield
        finally:
            self._give_back(waiter)

    def throttled(self, host: str, *, started_s: float) -> None:
        """Say that ``host`` answered "slow down" to a request that started at ``started_s`` (time of the loop)."""
        self._throttled += 1
        now_s = asyncio.get_running_loop().time()
        self.hedges.throttled(host, now_s=now_s)
        self._paces[host] = self._pace(host).throttled(
            width=self._width(host).allowed,
            started_s=started_s,
            now_s=now_s,
            unit=self._random_unit(),
            backoff=self._backoff,
        )

    def succeeded(self, host: str, *, started_s: float, size_bytes: int) -> None:
        """Say that ``host`` answered well, with ``size_bytes``, to a request that started at ``started_s``."""
        self._paces[host] = self._pace(host).succeeded(started_s=started_s)
        self._widths[host] = self._width(host).answered(
            in_flight=self._in_flight[host], size_bytes=size_bytes, now_s=asyncio.get_running_loop().time()
        )

    def _pace(self, host: str) -> HostPace:
        return self._paces.get(host) or HostPace.open(self._max_requests)

    def _width(self, host: str) -> WidthSearch:
        return self._widths.get(host) or WidthSearch.open(self._max_requests)

    def _give_back(self, waiter: _Waiter) -> None:
        self._bytes -= waiter.size_bytes
        self._in_flight[waiter.host] -= 1
        if not self._in_flight[waiter.host]:
            del self._in_flight[waiter.host]
        self._end(waiter)
        self._grant()

    def _end(self, waiter: _Waiter) -> None:
        self._requests[waiter.urgency] -= 1
        if self._requests[waiter.urgency]:
            return
        del self._requests[waiter.urgency]
        opener = self._openers.get(waiter.host)
        if opener is not None and opener.urgency is waiter.urgency and not opener.is_announced:
            del self._openers[waiter.host]

    def _alone_until_s(self, waiter: _Waiter) -> float:
        """Until when another transfer keeps a request from being granted, a time that may be over."""
        opener = self._openers.get(waiter.host)
        if opener is None or opener.urgency is waiter.urgency or waiter.urgency.demanded:
            return 0.0
        return opener.until_s

    def _grant(self) -> None:
        """Start what may start."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        resume_s = float("inf")
        # It looks at `demanded` now, not as it was when the request came: a prefetch that somebody has begun to wait
        # for moves ahead. Sorting is stable, so the requests of one transfer keep their order.
        for waiter in sorted(self._waiters, key=lambda waiter: (not waiter.urgency.demanded, waiter.urgency.place)):
            if waiter.granted.cancelled():
                continue  # its task has not run since
            alone_until_s = self._alone_until_s(waiter)
            if alone_until_s > now_s:
                resume_s = min(resume_s, alone_until_s)
                continue
            num_requests = self._in_flight.total()
            if num_requests >= self._max_requests or (
                num_requests and self._bytes + waiter.size_bytes > self._max_bytes
            ):
                # Nobody overtakes a large request, or it would starve. A later `_give_back` looks again.
                break
            pace, in_flight = self._pace(waiter.host), self._in_flight[waiter.host]
            if in_flight >= self._width(waiter.host).allowed or not pace.may_start(in_flight=in_flight, now_s=now_s):
                if pace.resume_s > now_s:
                    resume_s = min(resume_s, pace.resume_s)
                continue
            self._waiters.remove(waiter)
            self._bytes += waiter.size_bytes
            self._in_flight[waiter.host] += 1
            waiter.granted.set_result(None)
        self._wake_at(loop, resume_s)

    def _wake_at(self, loop: asyncio.AbstractEventLoop, resume_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if resume_s < float("inf"):
            self._timer = loop.call_at(resume_s, self._grant)
