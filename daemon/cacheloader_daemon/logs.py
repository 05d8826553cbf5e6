"""The daemon's log: few lines a minute of each kind, and a private daemon's never long, whatever a client does.

It lies on the disk that it shares with the cache. The log of a shared daemon is its supervisor's to keep short.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

from cacheloader.errors import masked_urls

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_LOG_BYTES = 4 * 2**20
"""A private daemon empties its log file when it has grown beyond this; it counts against the quota."""

WINDOW_S = 60.0
MOST_PER_WINDOW = 30
"""Lines of one kind in one window; 30 a minute tell a person all that 30,000 would."""


class FloodGate(logging.Filter):
    """Lets through the first lines of each kind (one place in the code) in each window, and says when it closes.

    Args:
        clock: Gives seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._window_ends_s = 0.0
        self._seen: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        now_s = self._clock()
        if now_s >= self._window_ends_s:
            self._window_ends_s = now_s + WINDOW_S
            self._seen.clear()
        kind = (record.name, str(record.msg))
        self._seen[kind] += 1
        if self._seen[kind] == MOST_PER_WINDOW:
            record.msg = f"{record.getMessage()} (no more such lines for up to {WINDOW_S:.0f} s)"
            record.args = ()
        return self._seen[kind] <= MOST_PER_WINDOW


class _Masking(logging.Formatter):
    """Leaves user names and signatures of URLs out of the log, wherever in a line or a traceback they are."""

    def format(self, record: logging.LogRecord) -> str:
        return masked_urls(super().format(record))


def begin() -> None:
    """Log to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Masking("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(FloodGate())
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def keep_short() -> None:
    """From now on empty the file behind standard error, if it is one, whenever it has grown too long."""
    empty_if_long()
    for handler in logging.getLogger().handlers:
        handler.addFilter(_KeptShort())


class _KeptShort(logging.Filter):
    def filter(self, _: logging.LogRecord) -> bool:
        empty_if_long()
        return True


def empty_if_long() -> None:
    """Empty the file behind standard error if it is one and has grown too long."""
    status = os.fstat(sys.stderr.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size > MAX_LOG_BYTES:
        os.ftruncate(sys.stderr.fileno(), 0)
