"""A second request for what the first one is late with: when, and how often. Stores answer a few requests very late.

A request is late once it takes longer than 95 of 100 did before it. The second one is paid out of a budget, a share of
all requests and of all bytes, so that a store that becomes slow as a whole is not asked twice for everything.

Source: J. Dean, L. A. Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_T = TypeVar("_T")

SHARE = 0.05
LATE = 0.95
REMEMBERED = 200
"""Durations that the 95th of a hundred is read off."""

LEAST_KNOWN = 40
"""Below this, two durations decide what is late."""

CALM_S = 30.0
"""After a "slow down" a host gets no second requests for so long."""


class HedgeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Second requests so far.

    Attributes:
        requests: First requests.
        size_bytes: What they asked for.
        hedges: Second requests.
        hedged_bytes: What they asked for.
        won: Second requests that were answered first.
    """

    requests: int
    size_bytes: int
    hedges: int
    hedged_bytes: int
    won: int


class Hedges:
    """The durations of each host, and the budget of all.

    Requests of different length take different times, so that they are compared within powers of two.

    Args:
        share: Second requests, and their bytes, as a share of the first ones; 0 for none.
    """

    def __init__(self, *, share: float = SHARE) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"hedge_share={share!r} is no share; pass a number between 0 (never) and 1")
        self._share = share
        self._durations_s: defaultdict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._calm_until_s: dict[str, float] = {}
        self._requests = self._size_bytes = self._hedges = self._hedged_bytes = self._won = 0

    def statistics(self) -> HedgeStatistics:
        """What was asked so far."""
        return HedgeStatistics(
            requests=self._requests,
            size_bytes=self._size_bytes,
            hedges=self._hedges,
            hedged_bytes=self._hedged_bytes,
            won=self._won,
        )

    def late_s(self, host: str, size_bytes: int) -> float | None:
        """After how long a request is late; ``None`` while too little is known."""
        durations_s = self._durations_s.get((host, size_bytes.bit_length()))
        if not self._share or durations_s is None or len(durations_s) < LEAST_KNOWN:
            return None
        return sorted(durations_s)[int(LATE * len(durations_s))]

    def started(self, size_bytes: int) -> None:
        """A first request begins, which pays for a part of a second one."""
        self._requests += 1
        self._size_bytes += size_bytes

    def ended(self, host: str, size_bytes: int, duration_s: float) -> None:
        """A request was answered; where a second one was faster, the first took at least that long."""
        self._durations_s[host, size_bytes.bit_length()].append(duration_s)

    def throttled(self, host: str, *, now_s: float) -> None:
        """``host`` asked to slow down."""
        self._calm_until_s[host] = now_s + CALM_S

    def take(self, host: str, size_bytes: int, *, now_s: float) -> bool:
        """Whether a second request may begin; it is then paid for."""
        if (
            now_s < self._calm_until_s.get(host, 0.0)
            or self._hedges + 1 > self._share * self._requests
            or self._hedged_bytes + size_bytes > self._share * self._size_bytes
        ):
            return False
        self._hedges += 1
        self._hedged_bytes += size_bytes
        return True

    async def run(self, read: Callable[[], Awaitable[_T]], *, host: str, size_bytes: int) -> _T:
        """The first answer to ``read``, which is asked a second time if the first is late. The other one is cancelled.

        Raises:
            OriginError: As ``read``; an error ends it only if no other request is left.
        """
        clock = asyncio.get_running_loop().time
        started_s, late_s = clock(), self.late_s(host, size_bytes)
        self.started(size_bytes)
        if late_s is None:
            answer = await read()
            self.ended(host, size_bytes, clock() - started_s)
            return answer
        first: asyncio.Future[_T] = asyncio.ensure_future(read())
        asked: set[asyncio.Future[_T]] = {first}
        try:
            done, _ = await asyncio.wait(asked, timeout=late_s)
            if not done and self.take(host, size_bytes, now_s=clock()):
                asked.add(asyncio.ensure_future(read()))
            won = await _first_answer(asked)
            self._won += won is not first
            answer = won.result()
            self.ended(host, size_bytes, clock() - started_s)
            return answer
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


async def _first_answer(asked: set[asyncio.Future[_T]]) -> asyncio.Future[_T]:
    """The first of them that has an answer, else the last that failed."""
    pending = set(asked)
    while True:
        # No deadline: who calls has one.
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        good = [one for one in done if not one.cancelled() and one.exception() is None]
        if good or not pending:
            return (good or list(done))[0]
