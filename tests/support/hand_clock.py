"""Time that passes when a test says so, for code whose time-outs a busy machine must not decide."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LATE_S = 1e-6
"""Timers are late by so much, as those of a real loop are: who looks again then finds that the time is over."""


class HandClock:
    """The running loop, in all but its time and its timers."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_s = 100.0
        self._timers: list[HandTimer] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, call: Callable[..., object], *args: object) -> HandTimer:
        timer = HandTimer(self._timers, self._now_s + delay_s + LATE_S, lambda: call(*args))
        self._timers.append(timer)
        return timer

    def let_pass(self, duration_s: float) -> None:
        """So much time is over at once; what is due within it is called, in its order."""
        end_s = self._now_s + duration_s
        while due := [timer for timer in self._timers if timer.due_s <= end_s]:
            timer = min(due, key=lambda timer: timer.due_s)
            timer.cancel()
            self._now_s = timer.due_s
            timer.call()
        self._now_s = end_s


class HandTimer:
    """One call that is to come."""

    def __init__(self, timers: list[HandTimer], due_s: float, call: Callable[[], object]) -> None:
        self.due_s = due_s
        self.call = call
        self._timers = timers

    def cancel(self) -> None:
        if self in self._timers:
            self._timers.remove(self)
