"""Bringing what was published to the disk, seldom and together: a flush for each shard would halve the write rate."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

BARRIER_S = 30.0
"""What a power failure makes suspect: half a minute of downloads, to be verified when they are read again."""


class BarrierThread:
    """Calls ``flush`` some time after something changed; while nothing changes it does not wake up.

    Args:
        flush: What to do; ``OSError`` from it is logged, and it is tried again after the next change.
        interval_s: Time from a change to its flush.
    """

    def __init__(self, flush: Callable[[], None], *, interval_s: float = BARRIER_S) -> None:
        self._flush = flush
        self._interval_s = interval_s
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-barrier", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Something is to be flushed."""
        self._changed.set()

    def stop(self) -> None:
        """End the thread, after a flush that is under way; calling it again does nothing."""
        self._stopping.set()
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            # No deadline: whoever changes something ends this wait, and so does ``stop``.
            self._changed.wait()
            if self._stopping.wait(self._interval_s):
                return
            self._changed.clear()
            try:
                self._flush()
            except OSError as error:
                log.warning("what was published could not be brought to the disk: %s", error)
