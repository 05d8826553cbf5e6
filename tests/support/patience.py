"""Deadlines that shall pass at one point of a conversation, and not before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_T = TypeVar("_T")

SECONDS = (0.3, 3.0, 30.0)


def patient_enough(
    attempt: Callable[[float], _T], *, is_early: Callable[[_T], bool], seconds: Sequence[float] = SECONDS
) -> _T:
    """What ``attempt`` gives with the first time-out, in seconds, that left the other side the time that it needed.

    Args:
        attempt: Called with one time-out after the other.
        is_early: Whether the time was over before the other side had done its part; the last outcome counts as it is.
        seconds: The time-outs.
    """
    for timeout_s in seconds[:-1]:
        outcome = attempt(timeout_s)
        if not is_early(outcome):
            return outcome
    return attempt(seconds[-1])
