"""What the report says in words, and when it says nothing."""

from __future__ import annotations

import random

import pytest

from cacheloader.goodput import events
from cacheloader.goodput.ledger import Ledger
from cacheloader.goodput.page import page
from cacheloader.goodput.report import report
from cacheloader.goodput.screen import lines
from tests.support.goodput_jobs import Job

STEP_S = 1.0


def job(lateness: list[list[float]], *, save_every: int = 0, stall_s: float = 0.0) -> Job:
    """Ranks that arrive at their collective so much late; one row a step."""
    made, now, world = Job(), 0.0, len(lateness[0])
    made.say(events.RunStart, 0, att="a", rank=0, world=world)
    made.all(events.AttemptStart, now, att="a", world=world)
    for number, late in enumerate(lateness, 1):
        now += STEP_S + max(late)
        for rank, own in enumerate(late):
            stay = round((max(late) - own) * 1e6) + 50
            made.say(events.Step, now, att="a", rank=rank, world=world, step=number, dur_s=STEP_S + max(late), coll_us=(stay,))  # noqa: E501  # fmt: skip
        if save_every and number % save_every == 0:
            made.all(events.CkptBegin, now, att="a", world=world, step=number, ckpt=f"c{number}")
            now += stall_s
            made.all(events.CkptStaged, now, att="a", world=world, step=number, ckpt=f"c{number}", stall_s=stall_s)
            made.say(events.CkptCommit, now, att="a", rank=0, world=world, step=number, ckpt=f"c{number}")
    made.all(events.AttemptEnd, now, att="a", world=world, cause="done")
    return made


def told(made: Job) -> tuple[str, str]:
    """The screen, and the page."""
    ledger = Ledger()
    ledger.add(made.found)
    account = ledger.account()
    found = report(account, name="x", damaged=[], is_live=False)
    return "\n".join(lines(found)), page(account, found)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("world", [2, 4, 16])
def test_ranks_of_equal_speed_are_not_named(world: int, seed: int) -> None:
    rng = random.Random(seed)
    screen, _ = told(job([[rng.expovariate(5.0) for _ in range(world)] for _ in range(100)], save_every=100))
    assert "is last in" not in screen
    assert "straggler wait costs" in screen
    assert "none stands out" in screen


@pytest.mark.parametrize("late_steps", [100, 12], ids=["always", "for-a-while"])
def test_a_rank_that_is_slower_than_the_others_noise_is_named_alone(late_steps: int) -> None:
    rng = random.Random(1)
    lateness = [[rng.expovariate(10.0) for _ in range(4)] for _ in range(100)]
    for row in lateness[:late_steps]:
        row[2] += 0.4
    screen, _ = told(job(lateness))
    assert "rank 2 is last in" in screen
    assert screen.count("is last in") == screen.count("rank 2 is last in")


def test_one_long_step_names_nobody() -> None:
    lateness = [[0.0] * 32 for _ in range(100)]
    lateness[50][7] = 0.9
    assert "is last in" not in told(job(lateness))[0]


def test_before_any_failure_the_report_says_so_and_advises_no_interval() -> None:
    for text in told(job([[0.0, 0.0]] * 100, save_every=20, stall_s=0.5)):
        assert "o failure was seen yet" in text
        assert "does not pay" in text
        for unknown in ("advised every", "Young", "a restart takes", "failures come every"):
            assert unknown not in text


def test_saves_that_cost_most_before_any_failure_are_advised_to_be_rarer_and_not_more_often() -> None:
    screen, _ = told(job([[0.0, 0.0]] * 100, save_every=2, stall_s=1.0))
    assert "checkpoint costs" in screen
    assert "no failure was seen yet, and saving more often than every" in screen.splitlines()[2]
