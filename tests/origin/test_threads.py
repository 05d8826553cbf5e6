"""Calls on threads, and what becomes of them when nobody waits any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cacheloader.origin.threads import DaemonThreads, run_to_its_end
from tests.support.waiting import until, wait_until


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


def test_no_call_waits_behind_another_while_a_thread_may_be_started():
    """Each turn begins as the threads of the turn before are just done: one of them seems idle and is not."""
    for _ in range(300):
        threads = DaemonThreads(3, name="test")
        for _ in range(3):
            all_here = threading.Barrier(3)
            futures = [threads.submit(all_here.wait, 30) for _ in range(3)]
            assert sorted(future.result(30) for future in futures) == [0, 1, 2]
        threads.shutdown()


async def test_the_pool_starts_no_more_threads_than_it_may():
    pool = DaemonThreads(3, name="test")
    together = threading.Barrier(3, timeout=30.0)  # passed only by three at a time
    seen: set[int] = set()

    def work() -> None:
        seen.add(threading.get_ident())
        together.wait()

    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.run_in_executor(pool, work) for _ in range(30)))
    assert len(seen) == 3
    assert pool._num_threads == 3
    pool.shutdown()


async def test_a_pool_that_rests_starts_no_second_thread():
    pool = DaemonThreads(8, name="test")
    loop = asyncio.get_running_loop()
    for _ in range(20):
        await loop.run_in_executor(pool, int)
        await until(lambda: pool._num_idle == 1)
    assert pool._num_threads == 1
    pool.shutdown()


def test_a_closed_pool_takes_no_calls_and_ends_its_threads():
    pool = DaemonThreads(2, name="closing")
    assert [future.result(60) for future in [pool.submit(int, text) for text in map(str, range(100))]] == [*range(100)]
    pool.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(int)
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("closing-")])
