"""A pytest plugin: threads of the test's process change as seldom or as often as chance will have it."""

from __future__ import annotations

import random
import sys

_INTERVALS_S = (1e-6, 1e-4, 5e-3, 5e-2)


def pytest_runtest_setup() -> None:
    """Another interval for each test."""
    sys.setswitchinterval(random.choice(_INTERVALS_S))
