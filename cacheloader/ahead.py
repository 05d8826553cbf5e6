"""Reading batches before they are asked for, in threads: for samples that need no computing, only bytes from files."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cacheloader.errors import CacheloaderError
from cacheloader.formats.coalesce import ALONE_BYTES
from cacheloader.heap import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MOST_BATCHES = 16
_MOST_SAMPLES = 2048
_LIMIT_BYTES = 64 << 20
_LOOK_S = 1.0
_PATIENCE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """A batch whose shards are at hand.

    Attributes:
        row: First row of its step.
        num_samples: Samples of it.
        size_bytes: Their bytes, 0 if that is not known.
        read: Reads them; any thread may call it.
    """

    row: int
    num_samples: int
    size_bytes: int
    read: Callable[[], Any]

    @property
    def is_small(self) -> bool:
        """Whether a second thread would be in the way: handing over the interpreter costs more than such a read."""
        return self.size_bytes < self.num_samples * ALONE_BYTES


class Planner(Protocol):
    """What plans batches: a pass over one epoch. One thread at a time may call it."""

    def plan(self, rows: Sequence[int]) -> list[Planned]:
        """The batches of the steps that start at these rows, or of the first few: one, or as many as need no wait."""
        ...

    def advance(self, row: int) -> None:
        """Every row before ``row`` is done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """How far to read ahead.

    Attributes:
        num_threads: Threads that read.
        num_batches: Batches that may be ready or under way; fewer where they hold more than 64 MiB a thread.
    """

    num_threads: int
    num_batches: int


def in_turn(planner: Planner, rows: range, make: Callable[[int, Any], Any]) -> Iterator[Any]:
    """Each batch, read when it is asked for.

    Args:
        planner: Says where the bytes are.
        rows: First row of each step.
        make: What becomes of a batch, by its first row and what was read.
    """
    done, most = 0, 1
    while done < len(rows):
        stretch = planner.plan(rows[done : done + most])
        done += len(stretch)
        most = _next_most(most, stretch)
        for planned in stretch:
            batch = planned.read()
            planner.advance(planned.row + rows.step)
            yield make(planned.row, batch)


class Ahead:
    """Each batch, read and made by threads of its own, so that ``next`` only hands it over.

    The threads start with the first ``next``. One of them at a time asks the planner for batches and waits for shards;
    all of them read. ``close`` ends them; one that still waits for a shard goes on its own and leaves no trace.

    Args:
        planner: Says where the bytes are.
        rows: First row of each step.
        options: How far to read ahead.
        make: What becomes of a batch, by its first row and what was read; any thread may call it.
    """

    def __init__(self, planner: Planner, rows: range, options: ReadAhead, make: Callable[[int, Any], Any]) -> None:
        self._planner = planner
        self._rows = rows
        self._options = options
        self._make = make
        self._pid = os.getpid()
        self._planned: deque[Planned] = deque()
        self._most = 1
        self._planning = threading.Lock()
        # The garbage collector may end an iteration that was left behind from any thread, also from one of its own.
        state = threading.RLock()
        self._has_room = threading.Condition(state)
        self._is_ready = threading.Condition(state)
        self._results: dict[int, tuple[Planned | None, Any]] = {}
        self._num_begun = 0
        self._num_taken = 0
        self._under_way: dict[int, int] = {}  # number of a batch that is being read -> first row
        self._held_bytes = 0
        self._wake_at = 0  # batches open at which a thread that waits for room wants to be woken
        self._is_over = False  # nothing more will begin
        self._threads: list[threading.Thread] = []

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        if self._pid != os.getpid():
            raise CacheloaderError("this iteration was begun before the process was forked; begin another")
        if not self._threads:
            self._start()
        with self._is_ready:
            while self._num_taken not in self._results:
                if self._is_over and self._num_taken == self._num_begun:
                    raise StopIteration
                if not self._is_ready.wait(_LOOK_S) and not any(thread.is_alive() for thread in self._threads):
                    raise CacheloaderError("the threads that read ahead are gone; begin another iteration")
            planned, batch = self._results.pop(self._num_taken)
            self._num_taken += 1
            if planned is not None:
                self._held_bytes -= planned.size_bytes
            if self._num_begun - self._num_taken <= self._wake_at:
                self._has_room.notify()
        if planned is None:
            raise batch
        return batch

    def close(self) -> None:
        """End the threads; calling it again does nothing."""
        if self._pid != os.getpid():
            return  # the threads are the parent's, and what they held at the fork stays locked here
        with self._has_room:
            self._is_over = True
            self._has_room.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_PATIENCE_S / len(self._threads))
        self._results.clear()

    def _start(self) -> None:
        keep_freed_memory()
        for number in range(self._options.num_threads):
            thread = threading.Thread(target=self._run, name=f"cacheloader-read-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while True:
            with self._planning:
                begun = self._begin()
                if begun is None:
                    return
                if begun[1].is_small:
                    self._read(*begun)
                    continue
            self._read(*begun)

    def _read(self, number: int, planned: Planned) -> None:
        try:
            batch = self._make(planned.row, planned.read())
        except Exception as error:  # noqa: BLE001  (raised again where the batch is taken)
            self._put(number, None, error)
        else:
            self._put(number, planned, batch)

    def _begin(self) -> tuple[int, Planned] | None:
        """The next batch to read, as soon as there is room for it; ``None`` if there is none."""
        try:
            self._prepare()
        except Exception as error:  # noqa: BLE001
            with self._is_ready:
                number, self._num_begun = self._num_begun, self._num_begun + 1
                self._is_over = True
            self._put(number, None, error)
            return None
        with self._has_room:
            while not self._is_over and self._planned and not self._may_begin(self._planned[0]):
                num_open = self._num_begun - self._num_taken
                # Waking a thread is much of what next() does, so that it is left out every second time.
                self._wake_at = max(1, num_open - 2)
                self._has_room.wait(_LOOK_S)
            if self._is_over or not self._planned:
                self._is_over = True
                self._is_ready.notify_all()
                return None
            planned = self._planned.popleft()
            number = self._num_begun
            self._num_begun += 1
            self._under_way[number] = planned.row
            self._held_bytes += planned.size_bytes
        return number, planned

    def _prepare(self) -> None:
        """Plan what is next, before there is room for it: what that takes, or waits for, shall delay nobody."""
        with self._has_room:
            # What was planned before is read first and its shards given back: a cache may be too small for those and
            # the next.
            while not self._is_over and not self._planned and self._under_way:
                self._has_room.wait(_LOOK_S)
            if self._is_over:
                return
            done = min(self._under_way.values()) if self._under_way else self._first_row(self._num_begun)
        self._planner.advance(done)
        if not self._planned and self._num_begun < len(self._rows):
            self._plan()

    def _plan(self) -> None:
        rows = self._rows[self._num_begun :]
        planned = self._planner.plan(rows[: self._most])
        self._most = _next_most(self._most, planned)
        self._planned.extend(planned)

    def _first_row(self, number: int) -> int:
        return self._rows[number] if number < len(self._rows) else self._rows.stop

    def _may_begin(self, planned: Planned) -> bool:
        num_open = self._num_begun - self._num_taken
        limit_bytes = _LIMIT_BYTES * self._options.num_threads
        return num_open < self._options.num_batches and (
            num_open == 0 or self._held_bytes + planned.size_bytes <= limit_bytes
        )

    def _put(self, number: int, planned: Planned | None, batch: Any) -> None:
        with self._is_ready:
            self._results[number] = (planned, batch)
            self._under_way.pop(number, None)
            self._is_ready.notify_all()
            if not self._under_way:
                self._has_room.notify_all()


def _next_most(most: int, planned: Sequence[Planned]) -> int:
    """How many batches to plan next: the first comes alone and soon, later ones share the cost of planning."""
    largest = max(batch.num_samples for batch in planned)
    return max(1, min(2 * most, _MOST_BATCHES, _MOST_SAMPLES // max(1, largest)))
