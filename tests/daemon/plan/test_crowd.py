"""Whether many fetches at once are worth it, from what links of some kinds bring."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cacheloader_daemon.plan.crowd import MEMORY_S, Crowd

if TYPE_CHECKING:
    from collections.abc import Callable

FEW, MANY = 3, 12


def crowded(bytes_per_s: Callable[[int], float], *, seconds: float = 40.0) -> tuple[Crowd, float]:
    """A link that was used by few and by many in turns."""
    crowd, now_s = Crowd(4), 0.0
    while now_s < seconds:
        for num_fetching in (FEW, MANY):
            now_s += 0.5
            crowd.passed(now_s, num_fetching)
            crowd.brought(int(0.5 * bytes_per_s(num_fetching)))
    return crowd, now_s


def test_many_bring_no_more_over_a_full_link() -> None:
    crowd, _ = crowded(lambda _: 1e6)
    assert not crowd.pays


def test_many_bring_more_where_answers_are_slow() -> None:
    crowd, _ = crowded(lambda num_fetching: 1e5 * num_fetching)
    assert crowd.pays


def test_many_are_tried_as_long_as_nothing_is_known() -> None:
    assert Crowd(4).pays
    crowd = Crowd(4)
    crowd.passed(100.0, 2)
    crowd.brought(10**9)
    assert crowd.pays, "of many at once nothing is known"


def test_many_are_tried_again_when_they_were_not_seen_for_long() -> None:
    crowd, now_s = crowded(lambda _: 1e6)
    crowd.passed(now_s + MEMORY_S / 2, FEW)
    crowd.brought(int(1e6 * MEMORY_S / 2))
    assert not crowd.pays
    crowd.passed(now_s + MEMORY_S + 1, FEW)
    assert crowd.pays


@pytest.mark.parametrize("idle_s", [1.0, 1000.0])
def test_a_pause_says_nothing_about_the_link(idle_s: float) -> None:
    crowd, now_s = crowded(lambda num_fetching: 1e5 * num_fetching)
    crowd.passed(now_s + idle_s, 0)
    assert crowd.pays


def test_a_link_that_became_narrow_is_noticed() -> None:
    crowd, now_s = crowded(lambda num_fetching: 1e5 * num_fetching)
    for _ in range(300):
        for num_fetching in (FEW, MANY):
            now_s += 0.5
            crowd.passed(now_s, num_fetching)
            crowd.brought(50_000)
    assert not crowd.pays
