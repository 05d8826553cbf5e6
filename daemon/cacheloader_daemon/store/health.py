"""What may still be asked of a cache directory, judged by the errors that it gave. Pure: told errors and times."""

from __future__ import annotations

import errno
import os
from collections import deque
from enum import Enum

STRIKES = 3
WINDOW_S = 60.0
"""So many errors within this time, of a kind that a disk may give once by chance, and it takes no more shards."""

RETRY_S = 60.0
MAX_RETRY_S = 1800.0
"""Time until it is tried again whether a directory takes shards, and the most to which failures double it."""

_GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE, errno.ESHUTDOWN})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG, errno.EINTR, errno.ENOENT, errno.EAGAIN})
"""Errors that say nothing against the directory."""


class Condition(Enum):
    """What a directory does; the text is what status and logs say."""

    WELL = "well"
    READ_ONLY = "read-only"
    FAILING = "failing"
    GONE = "gone"


class Health:
    """Of one directory. ``WELL`` takes shards; ``READ_ONLY`` and ``FAILING`` still serve; ``GONE`` does neither."""

    def __init__(self) -> None:
        self.condition = Condition.WELL
        self.cause = ""
        self._strikes: deque[float] = deque(maxlen=STRIKES)
        self._retry_s = RETRY_S
        self._retry_at_s = 0.0

    @property
    def takes(self) -> bool:
        """Whether shards may be put there."""
        return self.condition is Condition.WELL

    @property
    def serves(self) -> bool:
        """Whether shards may be read there."""
        return self.condition is not Condition.GONE

    def failed(self, error: OSError, now_s: float) -> bool:
        """Take note of an error; whether the condition has become worse."""
        number = error.errno or errno.EIO
        if self.condition is Condition.GONE or number in _FULL or number in _OURS:
            return False
        if number in _GONE:
            return self._worse(Condition.GONE, error, now_s)
        if self.condition is not Condition.WELL:
            return False
        if number == errno.EROFS:
            return self._worse(Condition.READ_ONLY, error, now_s)
        self._strikes.append(now_s)
        if len(self._strikes) == STRIKES and now_s - self._strikes[0] <= WINDOW_S:
            return self._worse(Condition.FAILING, error, now_s)
        return False

    def lost(self, now_s: float) -> bool:
        """The directory is no longer there; whether that is news."""
        if self.condition is Condition.GONE:
            return False
        return self._worse(Condition.GONE, OSError(errno.ENOENT, "it was removed"), now_s)

    def is_due(self, now_s: float) -> bool:
        """Whether it should be tried if a directory that took no shards does so again."""
        return self.condition in {Condition.READ_ONLY, Condition.FAILING} and now_s >= self._retry_at_s

    def tried(self, *, works: bool, now_s: float) -> None:
        """The outcome of such a trial."""
        if works:
            self.condition, self.cause = Condition.WELL, ""
            self._strikes.clear()
            return
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        self._retry_at_s = now_s + self._retry_s

    def _worse(self, condition: Condition, error: OSError, now_s: float) -> bool:
        self.condition = condition
        self.cause = error.strerror or os.strerror(error.errno or errno.EIO)
        self._retry_at_s = now_s + self._retry_s
        return True
