"""A session as the planner sees it: where it stands, how fast it moves, what it holds and waits for."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from cacheloader_daemon.plan.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from cacheloader_daemon.plan.accesses import AccessTable
    from cacheloader_daemon.plan.catalog import Catalog

IDLE_AFTER_S = 60.0
IDLE_BEATS = 4
"""A session silent for longer than this time, and for more than so many of its usual intervals, is taken to stay silent
for as long again (an evaluation, a debugger). A guess: one of eight workers moves with every eighth step only."""


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

    def top(self, allowed: Callable[[bytes], bool] | None = None) -> tuple[int, bytes] | None:
        """The smallest number with its key, which stays; of the keys that are ``allowed``, if that is given."""
        entries = self._entries
        while entries:
            number, key = entries[0]
            if self._numbers.get(key) == number:
                if allowed is None or allowed(key):
                    return entries[0]
                return min(((number, key) for key, number in self._numbers.items() if allowed(key)), default=None)
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

    __slots__ = ("catalog", "clock", "leases", "number", "owner", "pace", "reader", "seen_s", "waits")

    def __init__(self, session: int, catalog: Catalog, now_s: float, owner: str = "") -> None:
        self.number = session
        self.owner = owner
        self.catalog = catalog
        self.clock = 0
        self.pace = Pace()
        self.reader: Reader | None = None
        self.seen_s = now_s
        self.leases: dict[bytes, int] = {}
        self.waits: dict[int, bytes] = {}
        """Request number to the key it waits for, oldest first."""

    def wait(self, request: int, key: bytes, now_s: float) -> None:
        """A request without an answer so far."""
        self.waits[request] = key
        self.pace.waits(now_s)

    def answered(self, request: int, now_s: float) -> None:
        """A request has its answer; one that never had to wait may be named too."""
        if self.waits.pop(request, None) is not None and not self.waits:
            self.pace.goes_on(now_s)

    def move(self, clock: int, now_s: float) -> None:
        """Set the clock and learn from how long that took."""
        self.pace.moved(clock - self.clock, now_s)
        self.clock = clock

    def jump(self, clock: int, now_s: float) -> None:
        """Set the clock where a new plan says; that is no movement to learn from."""
        self.pace.jumped(now_s)
        self.clock = clock


class Reader:
    """One session's way through its plan.

    Args:
        session: Who reads.
        table: The plan; shared with other sessions of the same plan.
    """

    __slots__ = ("_num_over", "frontier", "kept", "session", "table", "victims")

    def __init__(self, session: Session, table: AccessTable) -> None:
        self.session = session
        self.table = table
        self.frontier = 0
        """Every access before it is over, or its shard is there or on its way."""
        self.victims = LazyHeap()
        """Unleased residents that this reader needs again, numbered by minus the row: farthest first."""
        self.kept = LazyHeap()
        """Likewise, those that are to stay."""
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
        seconds = rows / (self.session.pace.rows_per_s or typical_rows_per_s) if rows > 0 else 0.0
        idle_s = now_s - self.session.seen_s
        if idle_s > IDLE_AFTER_S and idle_s > IDLE_BEATS * self.session.pace.beat_s and not self.session.waits:
            return max(seconds, idle_s)
        return seconds
