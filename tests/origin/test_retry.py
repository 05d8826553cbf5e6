from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ConfigError
from cacheloader.origin.retry import Backoff, HostPace

units = st.floats(0, 1, exclude_max=True)
times_s = st.floats(0, 1e9)
backoffs = st.builds(
    lambda first_s, more_s, factor: Backoff(first_s=first_s, longest_s=first_s + more_s, factor=factor),
    st.floats(0, 10),
    st.floats(0, 100),
    st.floats(1, 10),
)


wide_open = HostPace.open
paces = st.integers(1, 100).map(wide_open)


@given(backoffs, st.integers(1, 10_000), units)
def test_a_delay_lies_between_nothing_and_its_ceiling(backoff: Backoff, failures: int, unit: float):
    assert 0 <= backoff.delay_s(failures, unit) <= backoff.ceiling_s(failures) <= backoff.longest_s


@given(backoffs, st.integers(1, 100))
def test_the_ceiling_never_falls_with_more_failures(backoff: Backoff, failures: int):
    assert backoff.ceiling_s(failures) <= backoff.ceiling_s(failures + 1)


def test_the_ceiling_doubles_until_it_is_longest():
    backoff = Backoff(first_s=0.5, factor=2, longest_s=3)
    assert [backoff.ceiling_s(failures) for failures in (1, 2, 3, 4, 5)] == [0.5, 1, 2, 3, 3]


def test_jitter_uses_the_whole_wait():
    assert Backoff(first_s=2).delay_s(1, 0.25) == 0.5


@pytest.mark.parametrize("wrong", [{"first_s": -1.0}, {"factor": 0.5}, {"first_s": 5.0, "longest_s": 1.0}])
def test_a_backoff_that_cannot_work_is_refused(wrong: dict[str, float]):
    with pytest.raises(ConfigError, match="is no backoff"):
        Backoff(**wrong)


@given(paces, st.lists(st.tuples(st.booleans(), times_s, units), max_size=50))
def test_whatever_is_answered_at_least_one_and_at_most_the_most_requests_are_allowed(
    pace: HostPace, answers: list[tuple[bool, float, float]]
):
    now_s = 0.0
    for good, step_s, unit in answers:
        started_s, now_s = now_s, now_s + step_s
        if good:
            pace = pace.succeeded(started_s=started_s)
        else:
            pace = pace.throttled(width=pace.most, started_s=started_s, now_s=now_s, unit=unit, backoff=Backoff())
        assert 1 <= pace.allowed <= pace.most
        assert pace.resume_s <= now_s + Backoff().longest_s
        assert pace.may_start(in_flight=0, now_s=pace.resume_s)
        assert not pace.may_start(in_flight=pace.most, now_s=pace.resume_s)


@given(paces, st.integers(1, 50), units)
def test_a_burst_of_slow_downs_counts_once(pace: HostPace, num_answers: int, unit: float):
    once = pace.throttled(width=pace.most, started_s=0.0, now_s=10.0, unit=unit, backoff=Backoff())
    often = once
    for answer in range(num_answers):
        often = often.throttled(width=pace.most, started_s=0.0, now_s=10.0 + answer, unit=unit, backoff=Backoff())
    assert often == once


def test_a_slow_down_to_a_request_sent_after_the_cut_cuts_again():
    first = wide_open(16).throttled(width=16, started_s=0.0, now_s=1.0, unit=0.5, backoff=Backoff())
    second = first.throttled(width=16, started_s=2.0, now_s=3.0, unit=0.5, backoff=Backoff())
    assert (first.allowed, second.allowed) == (8, 4)
    assert second.strikes == 2


@given(st.integers(1, 100), st.integers(0, 6))
def test_success_leads_back_to_full_speed(most: int, cuts: int):
    pace, now_s = wide_open(most), 0.0
    for _ in range(cuts):
        pace, now_s = (
            pace.throttled(width=pace.most, started_s=now_s, now_s=now_s + 1, unit=0.5, backoff=Backoff()),
            now_s + 1,
        )
    for _ in range(most * most):
        pace = pace.succeeded(started_s=now_s)
    assert pace.allowed == most
    assert pace.strikes == 0


def test_answers_to_old_requests_do_not_speed_up():
    slow = wide_open(16).throttled(width=16, started_s=5.0, now_s=6.0, unit=0.5, backoff=Backoff())
    assert slow.succeeded(started_s=5.5) == slow
    assert slow.succeeded(started_s=6.0).allowed > slow.allowed


def test_a_cut_halves_what_was_in_use_where_the_host_allowed_more():
    pace = wide_open(32).throttled(width=8, started_s=0.0, now_s=1.0, unit=0.5, backoff=Backoff())
    assert pace.allowed == 4
