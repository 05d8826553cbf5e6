"""What time shows: how fast a session reads, and how long fetches take."""

from __future__ import annotations

from collections import deque
from math import ceil, exp

RATE_MEMORY_S = 30.0
"""Time constant of the measured rate: some steps of a large model, a small part of an epoch. A guess."""

CALMING = 0.8
"""By which the usual interval of a session shrinks with each move that came sooner."""

LEAST_BUSY = 1 / 8
"""A session that waits nearly all the time is taken to want at most eight times what it gets."""


class Pace:
    """How fast a session reads while it does not wait for shards: who waits most must not be taken for slow.

    Attributes:
        rows_per_s: Rows in a second without waiting, ``None`` until that is known.
        beat_s: Usual time between two moves: the longest one lately.
    """

    __slots__ = ("_busy_s", "_moved_s", "_rows", "_seconds", "_waited_s", "_waits_since_s", "beat_s", "rows_per_s")

    def __init__(self) -> None:
        self.rows_per_s: float | None = None
        self.beat_s = 0.0
        self._moved_s: float | None = None
        self._rows = 0.0
        self._seconds = 0.0
        self._busy_s = 0.0
        self._waited_s = 0.0
        self._waits_since_s: float | None = None

    def waits(self, now_s: float) -> None:
        """The session begins to wait for a shard, or for one more."""
        if self._waits_since_s is None:
            self._waits_since_s = now_s

    def goes_on(self, now_s: float) -> None:
        """The session waits for nothing any more."""
        if self._waits_since_s is not None:
            self._waited_s += now_s - self._waits_since_s
            self._waits_since_s = None

    def moved(self, rows: int, now_s: float) -> None:
        """The session has got over ``rows`` since the last move."""
        if self._waits_since_s is not None:
            self._waited_s += now_s - self._waits_since_s
            self._waits_since_s = now_s
        if self._moved_s is not None:
            # A pause says little about the pace after it, so its weight is bounded.
            longest_s = max(RATE_MEMORY_S, 2 * self.beat_s)
            interval_s = now_s - self._moved_s
            self.beat_s = max(interval_s, CALMING * self.beat_s)
            passed_s = min(interval_s, longest_s)
            fade = exp(-passed_s / RATE_MEMORY_S)
            self._rows = self._rows * fade + rows
            self._seconds = self._seconds * fade + passed_s
            self._busy_s = self._busy_s * fade + max(0.0, passed_s - self._waited_s)
            if self._rows > 0 and self._seconds > 0:
                self.rows_per_s = self._rows / max(self._busy_s, LEAST_BUSY * self._seconds)
        self.jumped(now_s)

    def jumped(self, now_s: float) -> None:
        """The session stands elsewhere now; that is no movement to learn from."""
        self._moved_s = now_s
        self._waited_s = 0.0


class FetchTimes:
    """How long the last fetches took.

    Args:
        num_kept: How many are remembered; enough to see the slowest of a thousand.
    """

    ENOUGH = 16
    """Fetches from which on they say something."""

    def __init__(self, num_kept: int = 1024) -> None:
        self._times: deque[float] = deque(maxlen=num_kept)
        self._tail_s: float | None = None
        self._unseen = 0

    def add(self, seconds: float) -> None:
        """One more fetch has ended well."""
        self._times.append(seconds)
        self._unseen += 1

    @property
    def tail_s(self) -> float | None:
        """What all but one of a thousand stay below; ``None`` as long as there are too few to tell."""
        if len(self._times) < self.ENOUGH:
            return None
        # Sorting them anew for each one would cost more than it tells.
        if self._tail_s is None or self._unseen >= self.ENOUGH:
            ordered = sorted(self._times)
            self._tail_s = ordered[ceil(0.999 * len(ordered)) - 1]
            self._unseen = 0
        return self._tail_s
