"""The coming accesses of one plan, laid out so that "when is this shard needed next" is one bisection."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from cacheloader.errors import ProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Integer = TypeVar("_Integer", bound="np.integer[Any]")

NEVER = 2**63 - 1
"""The first clock of an access that does not exist."""

_SCAN = 4096
"""Accesses looked at together in search of a missing shard: a few microseconds of numpy."""


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The moment at which a plan needs most.

    Attributes:
        size_bytes: Reservations of the shards needed then.
        clock: The row.
        num_shards: How many they are.
    """

    size_bytes: int
    clock: int
    num_shards: int


def plan_digest(first_clock: NDArray[np.int64], stop_clock: NDArray[np.int64], shard: NDArray[np.int32]) -> bytes:
    """What names the content of a plan: workers of one rank announce equal ones."""
    digest = hashlib.blake2b(digest_size=16)
    for column in (first_clock, stop_clock, shard):
        digest.update(len(column).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(column).data)
    return digest.digest()


class AccessTable:
    """An immutable plan. Access ``a`` needs shard ``shard[a]`` during ``[first_clock[a], stop_clock[a])``.

    Args:
        digest: Its ``plan_digest``.
        first_clock: int64 [n], sorted.
        stop_clock: int64 [n], each above ``first_clock``.
        shard: int32 [n], index in the data set.
        canonical: int32 [num_shards]; the index that stands for a shard. It differs from the shard's own where a data
            set names one object twice.
        reserve_bytes: int64 [num_shards].

    Raises:
        ProtocolError: The arrays break these rules.
    """

    def __init__(
        self,
        *,
        digest: bytes,
        first_clock: NDArray[np.int64],
        stop_clock: NDArray[np.int64],
        shard: NDArray[np.int32],
        canonical: NDArray[np.int32],
        reserve_bytes: NDArray[np.int64],
    ) -> None:
        num_shards = len(canonical)
        _check(first_clock, stop_clock, shard, num_shards)
        self.digest = digest
        self.num_accesses = len(shard)
        # Copies: the caller's arrays may lie in memory that a client mapped.
        self.first_clock = np.array(first_clock, dtype=np.int64)
        self.stop_clock = np.array(stop_clock, dtype=np.int64)
        self.shard = canonical[shard]

        by_stop = np.argsort(self.stop_clock, kind="stable")
        self._stops = self.stop_clock[by_stop]
        self.shard_by_stop = self.shard[by_stop]

        # Accesses grouped by shard, in each group by first clock. "Until" is the running maximum of the stops: the
        # first access of a group whose until lies above a clock is the first one that is not over by then.
        self._access = np.argsort(self.shard, kind="stable").astype(np.int32)
        self._span = np.zeros(num_shards + 1, dtype=np.int32)
        np.cumsum(np.bincount(self.shard, minlength=num_shards), out=self._span[1:])
        self.used = np.diff(self._span) > 0
        """bool [num_shards]; whether any access needs the shard."""
        self._until = _running_stop(self.stop_clock, self.shard, self._access)
        self.peak = self._sweep(reserve_bytes)

        # Scalar access through a memoryview costs a fraction of numpy's.
        self._first_view = self.first_clock.data
        self._stops_view = self._stops.data
        self._access_view = self._access.data
        self._span_view = self._span.data
        self._until_view = self._until.data
        self._shard_view = self.shard.data
        self._stop_view = self.stop_clock.data

    def uses(self, shard: int) -> bool:
        """Whether any access, past or coming, needs ``shard``."""
        return self._span_view[shard] != self._span_view[shard + 1]

    def next_access(self, shard: int, clock: int) -> int:
        """The first access of ``shard`` that is not over at ``clock``; ``num_accesses`` if there is none."""
        stop = self._span_view[shard + 1]
        place = bisect_right(self._until_view, clock, self._span_view[shard], stop)
        return self._access_view[place] if place < stop else self.num_accesses

    def next_first(self, shard: int, clock: int) -> int:
        """When that access begins, at or before ``clock`` if it has begun; ``NEVER`` if there is none."""
        access = self.next_access(shard, clock)
        return self._first_view[access] if access < self.num_accesses else NEVER

    def is_repeated(self, shard: int) -> bool:
        """Whether ``shard`` is needed more than once, past accesses included."""
        return self._span_view[shard + 1] - self._span_view[shard] > 1

    def num_coming(self, shard: int, clock: int) -> int:
        """How many accesses of ``shard`` are not over at ``clock``."""
        stop = self._span_view[shard + 1]
        return stop - bisect_right(self._until_view, clock, self._span_view[shard], stop)

    def next_firsts(self, shards: NDArray[np.int64], clock: int) -> NDArray[np.int64]:
        """``next_first`` of many shards.

        Args:
            shards: int64 [m].
            clock: A row.

        Returns:
            int64 [m].
        """
        place, stop = self._span[shards].astype(np.int64), self._span[shards + 1].astype(np.int64)
        over = np.flatnonzero(place < stop)
        while len(over):
            over = over[self._until[place[over]] <= clock]
            place[over] += 1
            over = over[place[over] < stop[over]]
        firsts = np.full(len(shards), NEVER, dtype=np.int64)
        found = place < stop
        firsts[found] = self.first_clock[self._access[place[found]]]
        return firsts

    def coming(self, clock: int) -> NDArray[np.int32]:
        """The shards of all accesses that are not over at ``clock``, sorted, each once."""
        return _distinct(self.shard[self.stop_clock > clock])

    def first_of(self, access: int) -> int:
        """``first_clock`` of one access."""
        return self._first_view[access]

    def shard_of(self, access: int) -> int:
        """``shard`` of one access."""
        return self._shard_view[access]

    def num_begun(self, clock: int) -> int:
        """How many accesses begin at ``clock`` or before."""
        return bisect_right(self._first_view, clock)

    def num_over(self, clock: int, *, start: int = 0) -> int:
        """How many accesses are over at ``clock``; ``start`` of them are known to be."""
        return bisect_right(self._stops_view, clock, start)

    def next_missing(self, present: NDArray[np.uint8], start: int, clock: int) -> int:
        """The first access from ``start`` on that is not over and whose shard is not present, or ``num_accesses``.

        Args:
            present: uint8 [num_shards], 0 where nothing is there or on its way.
            start: An access.
            clock: A row.
        """
        if start >= self.num_accesses:
            return self.num_accesses
        # Mostly the answer is the one of the last time.
        if self._stop_view[start] > clock and not present[self._shard_view[start]]:
            return start
        while start < self.num_accesses:
            stop = min(start + _SCAN, self.num_accesses)
            missing = (present[self.shard[start:stop]] == 0) & (self.stop_clock[start:stop] > clock)
            place = int(missing.argmax())
            if missing[place]:
                return start + place
            start = stop
        return start

    def _sweep(self, reserve_bytes: NDArray[np.int64]) -> Peak:
        if not self.num_accesses:
            return Peak(size_bytes=0, clock=0, num_shards=0)
        shard = self.shard[self._access]
        first = self.first_clock[self._access]
        # Where accesses of one shard overlap, each counts only from where those before it end.
        follows = np.zeros(len(shard), dtype=bool)
        follows[1:] = shard[1:] == shard[:-1]
        first[1:] = np.where(follows[1:], np.maximum(first[1:], self._until[:-1]), first[1:])
        alone = first < self._until
        first, stop, size = first[alone], self._until[alone], reserve_bytes[shard[alone]]
        clock = np.concatenate([stop, first])
        change = np.concatenate([-size, size])
        # Stops come before starts of the same row, which the stable sort keeps.
        order = np.argsort(clock, kind="stable")
        needed = np.cumsum(change[order])
        peak = int(needed.argmax())
        at = int(clock[order[peak]])
        return Peak(size_bytes=int(needed[peak]), clock=at, num_shards=int(((first <= at) & (at < stop)).sum()))


def _check(
    first_clock: NDArray[np.int64], stop_clock: NDArray[np.int64], shard: NDArray[np.int32], num_shards: int
) -> None:
    if not len(first_clock) == len(stop_clock) == len(shard):
        raise ProtocolError(
            f"the arrays of a plan hold {len(first_clock)}, {len(stop_clock)} and {len(shard)} numbers; "
            "they have to be equally long"
        )
    if not len(shard):
        return
    if first_clock[0] < 0 or (first_clock[1:] < first_clock[:-1]).any():
        raise ProtocolError("the first clocks of a plan are negative or not sorted")
    if (stop_clock <= first_clock).any():
        raise ProtocolError("an access of a plan stops before it begins")
    if shard.min() < 0 or shard.max() >= num_shards:
        raise ProtocolError(f"a plan names shards {shard.min()} to {shard.max()} of a data set of {num_shards} shards")


def _running_stop(
    stop_clock: NDArray[np.int64], shard: NDArray[np.int32], access: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Running maximum of the stops within each shard's group of accesses."""
    values = _distinct(stop_clock)
    rank = np.searchsorted(values, stop_clock)
    # One accumulation serves all groups: a later group's numbers lie above all of an earlier one. Ranks instead of
    # clocks keep the products small whatever numbers a client sends.
    lift = shard[access].astype(np.int64) * len(values)
    running: NDArray[np.int64] = values[np.maximum.accumulate(rank[access] + lift) - lift] if len(access) else values
    return running


def _distinct(values: NDArray[_Integer]) -> NDArray[_Integer]:
    """The values, sorted, each once. ``np.unique`` imports masked arrays at its first call, while a reader waits."""
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]
