"""Calls that may wait for the cache's disk, on threads of their own, so that the loop never does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from cacheloader.origin.threads import DaemonThreads, run_to_its_end

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DiskThreads:
    """A few threads; what one of them has begun is always finished, whatever becomes of the task that waits for it."""

    def __init__(self, max_threads: int, *, name: str) -> None:
        self._threads = DaemonThreads(max_threads, name=name)

    async def run(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The result of ``call``, made on a thread.

        A task that is cancelled meanwhile still waits for the call to end. That has no deadline; the daemon's exit has.
        """
        return await run_to_its_end(self._threads, lambda: call(*args, **kwargs))

    async def take(self, call: Callable[[], _T], *, discard: Callable[[_T], None]) -> _T:
        """As ``run``, for a result that its receiver has to give back: a cancelled task discards it."""
        taken: list[_T] = []
        try:
            await self.run(lambda: taken.append(call()))
        except asyncio.CancelledError:
            for result in taken:
                discard(result)
            raise
        return taken[0]

    def close(self) -> None:
        """Let the threads end that are not stuck in a call; calling it again does nothing."""
        self._threads.shutdown()
