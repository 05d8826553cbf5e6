from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from cacheloader_daemon.store.barrier import BarrierThread

if TYPE_CHECKING:
    import pytest


def test_a_change_is_flushed_once_and_nothing_happens_without_one() -> None:
    flushed = threading.Semaphore(0)
    barrier = BarrierThread(flushed.release, interval_s=0.01)
    assert not flushed.acquire(timeout=0.05)
    barrier.changed()
    assert flushed.acquire(timeout=60)
    assert not flushed.acquire(timeout=0.05)
    barrier.stop()


def test_a_flush_that_fails_is_logged_and_tried_again_after_the_next_change(caplog: pytest.LogCaptureFixture) -> None:
    tried = threading.Semaphore(0)

    def flush() -> None:
        tried.release()
        raise OSError(5, "the disk is gone")

    barrier = BarrierThread(flush, interval_s=0.01)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            barrier.changed()
            assert tried.acquire(timeout=60)
        barrier.stop()
    assert caplog.text.count("the disk is gone") == 2


def test_stopping_does_not_wait_for_the_interval() -> None:
    barrier = BarrierThread(lambda: None, interval_s=3600.0)
    barrier.changed()
    barrier.stop()
    barrier.stop()
    assert not barrier._thread.is_alive()
