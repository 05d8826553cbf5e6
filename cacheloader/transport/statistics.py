"""What a session has done, and where it has read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteStatistics:
    """Where a session has read, since this process opened it.

    Attributes:
        peer: Who it is connected to now, "" if to nobody.
        is_away: Whether that is the substitute.
        reconnects: Connections to home that were made because an earlier one was lost.
        fallbacks: Times that it went away from home.
        returns: Times that it came back.
        away_seconds: Time spent away, the present one included.
    """

    peer: str
    is_away: bool
    reconnects: int
    fallbacks: int
    returns: int
    away_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportStatistics:
    """What one session has done since this process opened it.

    Attributes:
        acquires: Leases taken.
        acquire_seconds: Time spent waiting for them.
        route: Where it read.
    """

    acquires: int
    acquire_seconds: float
    route: RouteStatistics
