"""How fast a session is taken to move."""

from __future__ import annotations

import pytest
from cacheloader_daemon.plan.horizon import Horizon
from cacheloader_daemon.plan.pace import FetchTimes
from cacheloader_daemon.plan.readers import Session

from tests.daemon.plan.node import shards


@pytest.fixture
def session() -> Session:
    return Session(1, Horizon().open(shards(10)), 0.0)


@pytest.mark.parametrize("interval_s", [0.05, 1.0, 80.0])
def test_a_steady_pace_is_learnt_however_long_a_step_takes(session: Session, interval_s: float) -> None:
    for step in range(200):
        session.move(step * 32, step * interval_s)
    assert session.pace.rows_per_s == pytest.approx(32 / interval_s, rel=0.01)


def test_a_pause_is_forgotten_within_a_minute(session: Session) -> None:
    now_s = 0.0
    for step in range(400):
        now_s += 600.0 if step == 200 else 0.5
        session.move(step * 10, now_s)
    assert session.pace.rows_per_s == pytest.approx(20, rel=0.1)


def test_no_pace_is_known_before_the_first_movement(session: Session) -> None:
    session.jump(1000, 5.0)
    assert session.pace.rows_per_s is None
    session.move(1010, 7.0)
    assert session.pace.rows_per_s == pytest.approx(5.0)


def test_reports_at_the_same_moment_are_no_infinite_pace(session: Session) -> None:
    session.jump(0, 1.0)
    session.move(10, 1.0)
    assert session.pace.rows_per_s is None
    session.move(20, 2.0)
    assert session.pace.rows_per_s == pytest.approx(20.0, rel=0.05)


def test_time_spent_waiting_for_a_shard_makes_no_session_slow(session: Session) -> None:
    for step in range(100):
        session.wait(step, b"shard", step * 2.0)
        session.answered(step, step * 2.0 + 1.0)
        session.move(step * 32, step * 2.0 + 1.5)
    assert session.pace.rows_per_s == pytest.approx(32, rel=0.05), "half of each two seconds it had to wait"


def test_a_session_that_always_waits_is_not_taken_for_infinitely_fast(session: Session) -> None:
    session.wait(1, b"shard", 0.0)
    for step in range(100):
        session.move(step * 10, float(step))
    assert session.pace.rows_per_s == pytest.approx(80, rel=0.01)


def test_slowest_fetch_of_a_thousand_is_known_once_some_have_ended() -> None:
    times = FetchTimes()
    for _ in range(FetchTimes.ENOUGH - 1):
        times.add(1.0)
    assert times.tail_s is None
    for place in range(2000):
        times.add(place / 1000)
    assert times.tail_s == pytest.approx(1.99, rel=0.02)
