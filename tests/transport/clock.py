"""A clock that a test may move on."""

from __future__ import annotations

import time


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s
