"""The counting proxy, made hostile: outages, latencies with a heavy tail, and faults drawn from a seed."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support.counting_proxy import CountingProxy, Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def passing_faults(rng: random.Random) -> Fault:
    """One fault of one request that asking again cures; none of them gives wrong bytes."""
    after_bytes = rng.randrange(200_000)
    return rng.choice(
        [
            Fault(action="status", status=500, code="InternalError", times=1),
            Fault(action="status", status=503, code="SlowDown", times=1),
            Fault(action="status", status=503, code="ServiceUnavailable", times=1, retry_after_s=1),
            Fault(action="status", status=429, code="TooManyRequests", times=1, retry_after_s=1),
            Fault(action="reset", after_bytes=after_bytes, times=1),
            Fault(action="close", after_bytes=after_bytes, times=1),
            Fault(action="shorten", after_bytes=after_bytes, times=1),
            Fault(action="lengthen", times=1),
        ]
    )


class FaultProxy(CountingProxy):
    """As ``CountingProxy``, with what a store does on a bad day.

    Attributes:
        latency_of: Draws the wait before each answer to a GET, ``None`` for none.
    """

    def __init__(self, upstream_port: int) -> None:
        super().__init__(upstream_port)
        self.latency_of: Callable[[], float] | None = None
        self._rng: random.Random | None = None
        self._share = 0.0
        self._draw: Callable[[random.Random], Fault] = passing_faults
        self.num_drawn = 0
        self._place: socket.socket | None = None

    def draw_faults(self, seed: int, share: float, draw: Callable[[random.Random], Fault] = passing_faults) -> None:
        """Let this ``share`` of all GETs of objects meet a fault that is drawn from ``seed``; 0 ends that."""
        with self._lock:
            self._rng, self._share, self._draw = random.Random(seed), share, draw

    def go_down(self) -> None:
        """Refuse connections, and break those that are open."""
        self._call(self._down())

    def come_up(self) -> None:
        """Listen again at the same port."""
        self._call(self._listen())

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Be down while inside."""
        self.go_down()
        try:
            yield
        finally:
            self.come_up()

    def _call(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)  # type: ignore[arg-type]

    async def _down(self) -> None:
        await self._hang_up()
        # Nobody listens, so that connections are refused; and nobody else gets the port meanwhile.
        self._place = socket.socket()
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", self.port))

    async def _listen(self) -> None:
        await super()._listen()
        if self._place is not None:
            self._place.close()

    async def _hang_up(self) -> None:
        await super()._hang_up()
        if self._place is not None:
            self._place.close()

    async def _delay(self, method: str, target: str) -> None:
        await super()._delay(method, target)
        if self.latency_of is not None and method == "GET" and "list-type=" not in target:
            await asyncio.sleep(self.latency_of())

    def _matching_fault(self, method: str, target: str) -> Fault | None:
        fault = super()._matching_fault(method, target)
        if fault is not None or method != "GET" or "list-type=" in target:
            return fault
        with self._lock:
            if self._rng is not None and self._rng.random() < self._share:
                self.num_drawn += 1
                return self._draw(self._rng)
        return None


def heavy_tail(seed: int, *, typical_s: float, slow_s: Sequence[float], slow_share: float) -> Callable[[], float]:
    """Latencies of which a share is drawn from ``slow_s`` and the others lie around ``typical_s``."""
    rng = random.Random(seed)

    def draw() -> float:
        return rng.choice(slow_s) if rng.random() < slow_share else rng.uniform(0.5, 1.5) * typical_s

    return draw


@contextmanager
def unanswering_port() -> Iterator[int]:
    """A port whose queue of connections is full: a connect there gets no answer at all, as behind a firewall."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port: int = listener.getsockname()[1]
        waiting = []
        try:
            for _ in range(4):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", port))
                waiting.append(sock)
            yield port
        finally:
            for sock in waiting:
                sock.close()
