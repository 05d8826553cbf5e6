"""The time of an event loop, told by the test: so that no pause of the machine is taken for a wait."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable


class LoopClock:
    """What asyncio's running loop takes for the time while inside: it stands still but for ``advance``.

    Meanwhile nothing that sleeps or has a deadline on this loop ends by itself, ``until`` of ``waiting`` included; what
    other threads do, a server's among them, goes on.
    """

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._now_s = self._loop.time()
        self._loop.time = lambda: self._now_s  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._loop.time  # type: ignore[method-assign]

    def advance(self, seconds: float) -> None:
        """Let so much time be over; whoever waited for that is woken in the loop's next turns."""
        self._now_s += seconds

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
        """Return once ``condition`` holds, letting the loop run, but not its time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.001)
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Let the loop do all that is due now."""
        for _ in range(50):
            await asyncio.sleep(0)
