"""A session as the planner sees it: where it stands, how fast it moves, what it holds and waits for."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import exp
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from cacheloader_daemon.plan.accesses import AccessTable
    from cacheloader_daemon.plan.horizon import Catalog

RATE_MEMORY_S = 30.0
"""Time constant of the measured rate: some steps of a large model, a small part of an epoch. A guess."""

IDLE_AFTER_S = 60.0
IDLE_BEATS = 4
"""A session silent for longer than this time, and for more than so many of its usual intervals, is taken to stay silent
for as long again (an evaluation, a debugger). A guess: one of eight workers moves with every eighth step only."""

CALMING = 0.8
"""By which the usual interval of a session shrinks with each move that came sooner."""


class LazyHeap:
    """Keys by a number, smallest first; an outdated entry stays until it comes to the top or is outnumbered."""

    __slots__ = ("_entries", "_numbers")

    def __init__(self) -> None:
        self._entries: list[tuple[int, bytes]] = []
        self._numbers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: object) -> bool:
        return key in self._numbers

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._numbers)

    def number(self, key: bytes) -> int:
        """The number of ``key``, which is there."""
        return self._numbers[key]

    def put(self, key: bytes, number: int) -> None:
        """Add ``key``, or move it."""
        self._numbers[key] = number
        heappush(self._entries, (number, key))
        if len(self._entries) > 2 * len(self._numbers) + 64:
            self._rebuild()

    def put_all(self, pairs: Iterable[tuple[bytes, int]]) -> None:
        """Add or move many keys at once."""
        self._numbers.update(pairs)
        self._rebuild()

    def discard(self, key: bytes) -> None:
        """Remove ``key`` if it is there."""
        self._numbers.pop(key, None)

    def top(self) -> tuple[int, bytes] | None:
        """The smallest number with its key, which stays."""
        entries = self._entries
        while entries:
            number, key = entries[0]
            if self._numbers.get(key) == number:
                return entries[0]
            heappop(entries)
        return None

    def _rebuild(self) -> None:
        self._entries = [(number, key) for key, number in self._numbers.items()]
        heapify(self._entries)


class Session:
    """One connection.

    Args:
        session: Its number.
        catalog: What it reads.
        now_s: When it opened.
        owner: On whose account.
    """

    __slots__ = (
        "_moved_s",
        "_rows",
        "_seconds",
        "beat_s",
        "catalog",
        "clock",
        "leases",
        "number",
        "owner",
        "reader",
        "rows_per_s",
        "seen_s",
        "waits",
    )

    def __init__(self, session: int, catalog: Catalog, now_s: float, owner: str = "") -> None:
        self.number = session
        self.owner = owner
        self.catalog = catalog
        self.clock = 0
        self.reader: Reader | None = None
        self.rows_per_s: float | None = None
        self.seen_s = now_s
        self.beat_s = 0.0
        """Usual time between two moves: the longest one lately."""
        self.leases: dict[bytes, int] = {}
        self.waits: dict[int, bytes] = {}
        """Request number to the key it waits for, oldest first."""
        self._moved_s: float | None = None
        self._rows = 0.0
        self._seconds = 0.0

    def move(self, clock: int, now_s: float) -> None:
        """Set the clock and learn from how long that took."""
        if self._moved_s is not None:
            # A pause says little about the pace after it, so its weight is bounded.
            longest_s = max(RATE_MEMORY_S, 2 * self.beat_s)
            self.beat_s = max(now_s - self._moved_s, CALMING * self.beat_s)
            passed_s = min(now_s - self._moved_s, longest_s)
            fade = exp(-passed_s / RATE_MEMORY_S)
            self._rows = self._rows * fade + (clock - self.clock)
            self._seconds = self._seconds * fade + passed_s
            if self._rows > 0 and self._seconds > 0:
                self.rows_per_s = self._rows / self._seconds
        self._moved_s = now_s
        self.clock = clock

    def jump(self, clock: int, now_s: float) -> None:
        """Set the clock where a new plan says; that is no movement to learn from."""
        self._moved_s = now_s
        self.clock = clock


class Reader:
    """One session's way through its plan.

    Args:
        session: Who reads.
        table: The plan; shared with other sessions of the same plan.
    """

    __slots__ = ("_num_over", "frontier", "session", "table", "victims")

    def __init__(self, session: Session, table: AccessTable) -> None:
        self.session = session
        self.table = table
        self.frontier = 0
        """Every access before it is over, or its shard is there or on its way."""
        self.victims = LazyHeap()
        """Unleased residents that this reader needs again, numbered by minus the row: farthest first."""
        self._num_over = table.num_over(session.clock)

    def pass_rows(self) -> NDArray[np.int32]:
        """The shards of the accesses that are over now and were not at the last call."""
        before = self._num_over
        self._num_over = self.table.num_over(self.session.clock, start=before)
        return self.table.shard_by_stop[before : self._num_over]

    def seconds_until(self, first_clock: int, now_s: float, typical_rows_per_s: float) -> float:
        """Time until the session reaches a row.

        Args:
            first_clock: The row.
            now_s: The present.
            typical_rows_per_s: Used until this session's own rate is known.
        """
        rows = first_clock - self.session.clock
        seconds = rows / (self.session.rows_per_s or typical_rows_per_s) if rows > 0 else 0.0
        idle_s = now_s - self.session.seen_s
        if idle_s > IDLE_AFTER_S and idle_s > IDLE_BEATS * self.session.beat_s and not self.session.waits:
            return max(seconds, idle_s)
        return seconds
