"""What many fetches at once bring, compared with few."""

from __future__ import annotations

from math import exp

MEMORY_S = 30.0
"""Time constant of the rates that are compared, as that of a session's pace."""

WORTH = 1.2
"""How many times more many fetches have to bring than few. Where answers are slow, three times as many bring nearly
three times as much; over a full link as much. With slow answers over a link that was nearly full, a simulation waited 5
% longer than needed, and 8 % with 1.5."""

LEAST_SEEN_S = 1.0
"""Time under way from which on a rate says something."""


class Crowd:
    """Whether many fetches at once bring more in a second than few do.

    Over a link that is too narrow they do not: all of them come later, and also the one that is needed first. Where
    answers are slow they do.

    Args:
        few: Fetches at once that count as few.
    """

    def __init__(self, few: int) -> None:
        self._few = few
        self._rates = {True: _Rate(), False: _Rate()}
        self._now_s = 0.0
        self._is_few = True

    def passed(self, now_s: float, num_fetching: int) -> None:
        """So many fetches were under way until now."""
        self._is_few = num_fetching <= self._few
        if num_fetching:
            self._rates[self._is_few].add(now_s - self._now_s, now_s)
        self._now_s = now_s

    def brought(self, size_bytes: int) -> None:
        """One of them has ended well."""
        self._rates[self._is_few].size_bytes += size_bytes

    @property
    def pays(self) -> bool:
        """Whether they do; also as long as that is not known, or not any more."""
        few, many = (self._rates[is_few].at(self._now_s) for is_few in (True, False))
        return few is None or many is None or many > WORTH * few


class _Rate:
    """Bytes in a second, lately."""

    __slots__ = ("_seconds", "_seen_s", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0.0
        self._seconds = 0.0
        self._seen_s = 0.0

    def add(self, seconds: float, now_s: float) -> None:
        fade = exp(-seconds / MEMORY_S)
        self._seconds = self._seconds * fade + seconds
        self.size_bytes *= fade
        self._seen_s = now_s

    def at(self, now_s: float) -> float | None:
        """``None`` if it has not been seen for long enough, or not for too long."""
        if self._seconds < LEAST_SEEN_S or now_s - self._seen_s > MEMORY_S:
            return None
        return self.size_bytes / self._seconds
