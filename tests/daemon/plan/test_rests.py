from __future__ import annotations

from cacheloader_daemon.plan.rests import MAX_REST_FACTOR, Rests

from tests.daemon.plan.node import key


def test_each_failure_in_a_row_doubles_the_rest_up_to_a_bound() -> None:
    rests, now_s, lengths = Rests(5.0), 0.0, []
    for _ in range(8):
        rests.failed(key(1), now_s)
        length = 0.0
        while key(1) in rests:
            length += 5.0
            assert list(rests.rested(now_s + length)) == [key(1)] * (key(1) not in rests)
        lengths.append(length)
        now_s += length
    assert lengths == [5, 10, 20, 40, 80, 160, 160, 160]
    assert lengths[-1] == 5 * MAX_REST_FACTOR


def test_success_ends_the_rest_and_forgets_the_failures() -> None:
    rests = Rests(5.0)
    rests.failed(key(1), 0.0)
    rests.failed(key(1), 0.0)
    rests.succeeded(key(1))
    assert key(1) not in rests
    rests.failed(key(1), 100.0)
    assert list(rests.rested(104.9)) == []
    assert list(rests.rested(105.0)) == [key(1)]


def test_a_rest_that_begins_anew_does_not_end_with_the_old_one() -> None:
    rests = Rests(5.0)
    rests.failed(key(1), 0.0)
    rests.failed(key(1), 3.0)
    assert list(rests.rested(5.0)) == []
    assert list(rests.rested(13.0)) == [key(1)]
    assert list(rests) == []
