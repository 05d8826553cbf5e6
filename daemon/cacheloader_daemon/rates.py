"""Limits of pace: bytes and requests a second that are asked of origins, messages a second that are read of clients."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheloader.origin.slots import TransferSlots
from cacheloader_daemon.guarded import GuardedOrigin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from cacheloader.origin.base import Origin
    from cacheloader.origin.slots import Urgency
    from cacheloader_daemon.tenants import Tenant

BURST_S = 0.25
"""What was not used is made up for within this time, so that a limit is reached in spite of pauses."""


class Meter:
    """When the next may begin, if so much a second is allowed.

    Args:
        per_s: Units a second; 0 for no limit.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._free_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """How long the next has to wait; 0 if it may begin now."""
        return max(0.0, self._free_s - now_s) if self._per_s else 0.0

    def spend(self, units: float, now_s: float) -> None:
        """So much begins now."""
        if self._per_s:
            self._free_s = max(self._free_s, now_s - BURST_S) + units / self._per_s


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    size_bytes: int
    urgency: Urgency
    granted: asyncio.Future[None]


class OriginRate:
    """Bytes and requests a second; who is waited for goes before what is fetched ahead.

    Args:
        max_bytes_per_s: 0 for no limit.
        max_requests_per_s: 0 for no limit.
    """

    def __init__(self, *, max_bytes_per_s: int = 0, max_requests_per_s: int = 0) -> None:
        self._meters = (Meter(max_bytes_per_s), Meter(max_requests_per_s))
        self.is_limited = bool(max_bytes_per_s or max_requests_per_s)
        self._waiters: list[_Waiter] = []
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, size_bytes: int, urgency: Urgency) -> None:
        """Wait until a request for ``size_bytes`` may begin. Ends, at the latest, when all before it had their turn."""
        waiter = _Waiter(size_bytes=size_bytes, urgency=urgency, granted=asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._grant()
        try:
            await waiter.granted
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _grant(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiters:
            now_s = loop.time()
            wait_s = max(meter.wait_s(now_s) for meter in self._meters)
            if wait_s > 0:
                self._timer = loop.call_later(wait_s, self._grant)
                return
            waiter = next((one for one in self._waiters if one.urgency.demanded), self._waiters[0])
            self._waiters.remove(waiter)
            if waiter.granted.cancelled():
                continue
            for meter, units in zip(self._meters, (waiter.size_bytes, 1), strict=True):
                meter.spend(units, now_s)
            waiter.granted.set_result(None)


class PacedSlots(TransferSlots):
    """The slots that all transfers share, behind limits of pace.

    Args:
        slots: They.
        rates: The limits, each waited for in turn.
    """

    def __init__(self, slots: TransferSlots, rates: Sequence[OriginRate]) -> None:
        self.hedges = slots.hedges
        self._slots = slots
        self._rates = rates

    @asynccontextmanager
    async def hold(self, host: str, *, size_bytes: int, urgency: Urgency) -> AsyncIterator[None]:
        """As those of the slots; the wait for the pace comes first, so that no slot stands idle for it."""
        for rate in self._rates:
            await rate.take(size_bytes, urgency)
        async with self._slots.hold(host, size_bytes=size_bytes, urgency=urgency):
            yield

    def throttled(self, host: str, *, started_s: float) -> None:
        """As those of the slots."""
        self._slots.throttled(host, started_s=started_s)

    def succeeded(self, host: str, *, started_s: float, size_bytes: int) -> None:
        """As those of the slots."""
        self._slots.succeeded(host, started_s=started_s, size_bytes=size_bytes)


class OriginRates:
    """The node's limit and those of its tenants.

    Args:
        node: Holds for all.
        tenants: Those that may have one of their own.
    """

    def __init__(self, node: OriginRate, tenants: Iterable[Tenant] = ()) -> None:
        self._node = node
        self._tenants = {
            tenant.name: OriginRate(
                max_bytes_per_s=tenant.max_bytes_per_s, max_requests_per_s=tenant.max_origin_requests_per_s
            )
            for tenant in tenants
        }

    def slots(self, slots: TransferSlots, origin: Origin) -> TransferSlots:
        """``slots`` behind the limits that hold for requests to ``origin``."""
        rates = [self._node]
        if isinstance(origin, GuardedOrigin) and origin.tenant_name in self._tenants:
            rates.insert(0, self._tenants[origin.tenant_name])
        rates = [rate for rate in rates if rate.is_limited]
        return PacedSlots(slots, rates) if rates else slots
