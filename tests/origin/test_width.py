from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.origin.width import FIRST_REQUESTS, HELD_ROUNDS, WidthSearch

if TYPE_CHECKING:
    from collections.abc import Callable

PART_BYTES = 8 * 2**20


def shared_link(bytes_per_s: float) -> Callable[[int], float]:
    """Rate of a link that one request fills as well as many do."""
    return lambda _requests: bytes_per_s


def bounded_connections(bytes_per_s: float, *, link_bytes_per_s: float) -> Callable[[int], float]:
    """Rate where each connection has a bound of its own, as object stores in the cloud have it, and so has the link."""
    return lambda requests: min(requests * bytes_per_s, link_bytes_per_s)


def searched(search: WidthSearch, rate: Callable[[int], float], *, answers: int, now_s: float = 0.0) -> list[int]:
    """Requests allowed after each answer, on a link that always has as many in flight as are allowed."""
    widths = []
    for _ in range(answers):
        now_s += PART_BYTES / rate(search.allowed)
        search = search.answered(in_flight=search.allowed, size_bytes=PART_BYTES, now_s=now_s)
        widths.append(search.allowed)
    return widths


def test_a_link_that_is_full_is_not_asked_for_more_at_once():
    widths = searched(WidthSearch.open(32), shared_link(4e8), answers=60)
    assert max(widths) == 2 * FIRST_REQUESTS
    assert widths[-1] == FIRST_REQUESTS


def test_connections_with_a_bound_of_their_own_are_used_to_the_full_width():
    widths = searched(WidthSearch.open(32), bounded_connections(9e7, link_bytes_per_s=1e11), answers=100)
    assert widths[-1] == 32


def test_the_width_ends_where_the_link_is_full():
    widths = searched(WidthSearch.open(64), bounded_connections(9e7, link_bytes_per_s=9e7 * 16), answers=200)
    assert widths[-1] == 16


def test_a_link_that_grows_is_found_again():
    widths = searched(
        WidthSearch(most=32, allowed=FIRST_REQUESTS, held_rounds=HELD_ROUNDS),
        bounded_connections(9e7, link_bytes_per_s=1e11),
        answers=(HELD_ROUNDS + 20) * 32,
    )
    assert widths[-1] == 32


def test_rounds_in_which_nobody_wanted_more_say_nothing():
    search = WidthSearch.open(32)
    for answer in range(100):
        search = search.answered(in_flight=FIRST_REQUESTS - 1, size_bytes=PART_BYTES, now_s=float(answer))
    assert search == WidthSearch.open(32)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 32])
def test_the_full_width_is_reached_whatever_it_is(most: int):
    widths = searched(WidthSearch.open(most), bounded_connections(1e8, link_bytes_per_s=1e12), answers=50 * most)
    assert max(widths) == most


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 2**30), st.floats(0, 1e6)), max_size=200),
)
def test_whatever_comes_at_least_one_and_at_most_the_most_requests_are_allowed(
    most: int, answers: list[tuple[int, int, float]]
):
    search, now_s = WidthSearch.open(most), 0.0
    for in_flight, size_bytes, step_s in answers:
        now_s += step_s
        search = search.answered(in_flight=in_flight, size_bytes=size_bytes, now_s=now_s)
        assert 1 <= search.allowed <= most
