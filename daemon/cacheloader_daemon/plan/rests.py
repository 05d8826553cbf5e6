"""Shards whose fetch failed: fetched ahead again after a rest, which doubles with each failure in a row."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_REST_FACTOR = 32
"""The longest rest, as a multiple of the first."""


class Rests:
    """Resting shards by key.

    Args:
        first_s: The rest after the first failure.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._until_s: dict[bytes, float] = {}
        self._order: list[tuple[float, bytes]] = []
        self._failures: dict[bytes, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._until_s

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._until_s)

    def failed(self, key: bytes, now_s: float) -> None:
        """A fetch failed; the rest begins, or begins anew."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        until_s = now_s + self._first_s * min(2 ** (failures - 1), MAX_REST_FACTOR)
        self._until_s[key] = until_s
        heappush(self._order, (until_s, key))

    def succeeded(self, key: bytes) -> None:
        """A fetch succeeded; earlier failures are forgotten."""
        self._failures.pop(key, None)
        self._until_s.pop(key, None)

    def rested(self, now_s: float) -> Iterator[bytes]:
        """Shards whose rest ends now; each is given once."""
        while self._order and self._order[0][0] <= now_s:
            until_s, key = heappop(self._order)
            if self._until_s.get(key) == until_s:
                del self._until_s[key]
                yield key

    def forget_failures(self) -> None:
        """Nobody is left who could ask for the shards that failed; rests under way go on."""
        self._failures.clear()
