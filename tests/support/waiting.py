"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.005


async def until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    """Return once ``condition`` holds, letting the loop run meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(POLL_S)


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    """Return once ``condition`` holds; for tests without a loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(POLL_S)
