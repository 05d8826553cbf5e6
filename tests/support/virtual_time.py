"""A clock for tests of deadlines that no busy machine can make them miss."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def virtual_time() -> Iterator[Callable[[], float]]:
    """Let the clock of the running loop stand still, and jump to the next timer when nothing else is left to do.

    However long the machine takes, no time passes but what somebody waits for, so that a deadline is missed exactly if
    more was waited for. Not for tests in which threads or other processes take part: nothing waits for them.

    Yields:
        The loop's clock.
    """
    loop: Any = asyncio.get_running_loop()
    selector = loop._selector
    select, now_s = selector.select, loop.time()

    def jump(timeout_s: float | None = None) -> Any:
        nonlocal now_s
        found = select(None if timeout_s is None else 0)
        if not found and timeout_s is not None:
            now_s += timeout_s
        return found

    selector.select, loop.time = jump, lambda: now_s
    try:
        yield loop.time
    finally:
        del selector.select, loop.time
