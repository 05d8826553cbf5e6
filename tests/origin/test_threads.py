"""Calls on threads, and what becomes of them when nobody waits any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cacheloader.origin.threads import DaemonThreads, run_to_its_end
from tests.support.waiting import until


async def test_a_task_that_is_cancelled_twice_still_waits_for_what_its_thread_has_begun():
    threads = DaemonThreads(1, name="test")
    has_begun, may_end = threading.Event(), threading.Event()

    def call() -> None:
        has_begun.set()
        assert may_end.wait(60)

    task = asyncio.ensure_future(run_to_its_end(threads, call))
    await until(has_begun.is_set)
    for _ in range(2):
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.05)
        assert not done
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    threads.shutdown()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_an_error_of_the_call_is_its_waiters_unless_that_was_cancelled(is_cancelled):
    has_begun, may_end = threading.Event(), threading.Event()

    def call() -> None:
        has_begun.set()
        assert may_end.wait(60)
        raise OSError("disk full")

    task = asyncio.ensure_future(run_to_its_end(None, call))
    await until(has_begun.is_set)
    if is_cancelled:
        task.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError if is_cancelled else OSError):
        await task
