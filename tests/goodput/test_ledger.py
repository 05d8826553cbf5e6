"""The account of made-up jobs whose truth is known, and what must hold for any events at all."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheloader.goodput import events
from cacheloader.goodput.categories import Category
from cacheloader.goodput.ledger import Ledger
from cacheloader.goodput.report import advice_of
from tests.support.goodput_jobs import SECOND, START_S, Job, end_to_end_vector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cacheloader.goodput.account import Account
    from cacheloader.goodput.events import Event


def account(found: Iterable[Event], **options: Any) -> Account:
    ledger = Ledger()
    ledger.add(found)
    return ledger.account(**options)


def seconds(found: Account) -> dict[Category, float]:
    """Device-seconds of the categories that occur."""
    assert sum(found.totals.values()) == found.paid_ns
    return {category: ns / 1e9 for category, ns in found.totals.items() if ns}


def at(time_s: float) -> int:
    return START_S * SECOND + round(time_s * SECOND)


def test_the_end_to_end_vector_is_reproduced_exactly() -> None:
    found = account(end_to_end_vector())
    assert {category: value / 8 for category, value in seconds(found).items()} == {
        Category.COMPUTE: 900,
        Category.FETCH: 100,
        Category.CKPT: 25,
        Category.INIT: 60,
        Category.LOST: 147,
        Category.DETECT: 9,
        Category.SPIN: 270,
        Category.RESTART: 81,
    }
    assert found.paid_ns == 8 * 1592 * SECOND
    assert round(100 * found.goodput_time, 2) == 56.53
    assert round(100 * found.kept_share, 2) == 62.81
    assert round(100 * found.goodput_work, 2) == 62.81
    assert round(found.useful_tokens_per_hour) == 226_131
    assert (found.steps.tokens_issued, found.steps.tokens_kept) == (114_000, 100_000)
    (failure,) = found.failures
    assert (failure.lost_ns, failure.rank) == (1176 * SECOND, 3)
    assert dict(failure.stages) == {
        "detection": 9 * SECOND,
        "spin": 270 * SECOND,
        "relaunch": 43 * SECOND,
        "init": 38 * SECOND,
        "first batch": 1 * SECOND,
        "first step": 9 * SECOND,
    }
    assert {(save.stall_ns, save.lag_ns) for save in found.saves if save.step < 100} == {(5 * SECOND, 15 * SECOND)}


def test_any_order_of_the_files_and_lines_and_any_repetition_gives_the_same_account() -> None:
    events_ = end_to_end_vector()
    truth = account(events_)
    shuffled = events_ * 2
    random.Random(5).shuffle(shuffled)
    ledger = Ledger()
    for start in range(0, len(shuffled), 97):
        ledger.add(shuffled[start : start + 97])
        ledger.account()  # what is asked in between changes nothing
    found = ledger.account()
    assert found.totals == truth.totals
    assert (found.failures, found.saves, found.committed) == (truth.failures, truth.saves, truth.committed)


def test_windows_that_do_not_overlap_add_up_to_the_run() -> None:
    found = account(end_to_end_vector())
    edges = [found.start_ns, *(found.start_ns + round(i * 61.37 * SECOND) for i in range(1, 25)), found.end_ns]
    windows = [found.window(a, b) for a, b in pairwise(edges)]
    for category in Category:
        assert sum(window[category] for window in windows) == found.totals[category]
    assert [sum(w.values()) for w in windows] == [found.paid_in(a, b) for a, b in pairwise(edges)]


def test_a_hang_window_is_not_productive() -> None:
    found = account(end_to_end_vector())
    spin = found.window(at(1036), at(1306))
    assert spin[Category.SPIN] == sum(spin.values()) == 8 * 270 * SECOND


def steps(
    job: Job, numbers: range, *, start_s: float, dur_s: float = 1.0, world: int = 1, att: str = "a1", **fields: Any
) -> float:
    """Equal steps of all ranks; returns when they end."""
    for step in numbers:
        start_s += dur_s
        job.all(events.Step, start_s, att=att, world=world, step=step, dur_s=dur_s, **fields)
    return start_s


def test_a_loss_spike_rollback_is_lost_work_and_the_steps_count_once_when_they_are_done_again() -> None:
    job = Job()
    job.all(events.AttemptStart, 0, att="a1", world=1)
    now = steps(job, range(1, 31), start_s=0, tokens=10)
    job.say(events.CkptCommit, now, att="a1", rank=0, world=1, step=20, ckpt="c")
    job.say(events.Rollback, now, att="a1", rank=0, world=1, from_step=30, to_step=20, reason="loss spike")
    now = steps(job, range(21, 41), start_s=now, tokens=10)
    job.say(events.CkptCommit, now, att="a1", rank=0, world=1, step=40, ckpt="d")
    job.all(events.AttemptEnd, now, att="a1", world=1, cause="done")
    found = account(job.found)
    assert seconds(found) == {Category.COMPUTE: 40, Category.LOST: 10}
    assert (found.steps.tokens_issued, found.steps.tokens_kept) == (500, 400)
    assert found.undone.rollback_ns == 10 * SECOND


def test_steps_behind_the_last_commit_are_provisional_and_a_commit_promotes_them() -> None:
    job = Job()
    job.all(events.AttemptStart, 0, att="a1", world=1)
    now = steps(job, range(1, 11), start_s=0)
    found = account(job.found, now_ns=at(now))
    assert seconds(found) == {Category.PROVISIONAL: 10}
    job.say(events.CkptCommit, now, att="a1", rank=0, world=1, step=6, ckpt="c")
    assert seconds(account(job.found, now_ns=at(now))) == {Category.COMPUTE: 6, Category.PROVISIONAL: 4}


def test_a_resume_from_an_older_checkpoint_takes_back_what_a_newer_one_had_kept() -> None:
    job = Job()
    job.all(events.AttemptStart, 0, att="a1", world=1)
    now = steps(job, range(1, 31), start_s=0)
    for step in (10, 20, 30):
        job.say(events.CkptCommit, now, att="a1", rank=0, world=1, step=step, ckpt=f"c{step}")
    job.all(events.AttemptEnd, now, att="a1", world=1, cause="done")
    job.all(events.AttemptStart, now, att="a2", world=1)
    job.say(
        events.Restore, now, att="a2", rank=0, world=1, step=10, ckpt="c10",
        skipped=(("c30", "a flipped bit"), ("c20", "no manifest")),
    )  # fmt: skip
    now = steps(job, range(11, 16), start_s=now, att="a2")
    job.all(events.AttemptEnd, now, att="a2", world=1, cause="done")
    found = account(job.found)
    assert seconds(found) == {Category.COMPUTE: 10, Category.LOST: 20, Category.PROVISIONAL: 5}
    assert found.restores == ((10, "c10", (("c30", "a flipped bit"), ("c20", "no manifest"))),)


def test_a_job_that_starts_from_nothing_again_has_lost_everything() -> None:
    job = Job()
    for att, start in (("a1", 0), ("a2", 20)):
        job.all(events.AttemptStart, start, att=att, world=2)
        now = steps(job, range(1, 11), start_s=start, world=2, att=att)
        job.all(events.AttemptEnd, now, att=att, world=2, cause="done")
    assert seconds(account(job.found)) == {Category.LOST: 20, Category.GAP: 20, Category.PROVISIONAL: 20}


def test_the_denominator_follows_the_membership() -> None:
    job = Job()
    job.say(events.RunStart, 0, att="a1", rank=0, world=4, n_devices=4)
    job.all(events.AttemptStart, 0, att="a1", world=4)
    now = steps(job, range(1, 11), start_s=0, world=4)
    job.all(events.AttemptEnd, now, att="a1", world=4, cause="done")
    job.all(events.AttemptStart, now + 5, att="a2", world=3)
    now = steps(job, range(11, 21), start_s=now + 5, world=3, att="a2")
    job.say(events.Membership, now - 4, att="a2", rank=0, world=3, n_devices=3)
    job.say(events.CkptCommit, now, att="a2", rank=0, world=3, step=20, ckpt="c")
    job.all(events.AttemptEnd, now, att="a2", world=3, cause="done")
    found = account(job.found)
    assert found.paid_ns == (4 * 10 + 4 * 5 + 4 * 6 + 3 * 4) * SECOND
    assert seconds(found) == {Category.COMPUTE: 40 + 30, Category.GAP: 20 + 6}


def test_attempts_that_overlap_never_keep_more_time_than_was_paid_for() -> None:
    job = Job()
    for att, begin, first in (("a1", 0, 1), ("a2", 20, 51)):  # on two nodes, whose clocks differ by half a minute
        job.all(events.AttemptStart, begin, att=att, world=1)
        for step in range(first, first + 50):
            job.all(events.Step, begin + step - first + 1, att=att, world=1, step=step, dur_s=1.0, fetch_s=0.1)
        job.all(events.CkptCommit, begin + 50.5, att=att, world=1, step=first + 49, ckpt=f"{att}-{first}")
    found = account(job.found)
    assert found.kept_step_ns <= found.paid_ns
    assert 0.9 <= found.kept_share <= 1


def test_silence_of_more_than_three_heartbeats_is_not_productive_until_the_step_is_done_after_all() -> None:
    job = Job()
    job.all(events.AttemptStart, 0, att="a1", world=1)
    steps(job, range(1, 3), start_s=0, dur_s=10)
    assert seconds(account(job.found, now_ns=at(80))) == {Category.PROVISIONAL: 35, Category.DETECT: 45}
    steps(job, range(3, 4), start_s=20, dur_s=60)
    assert seconds(account(job.found, now_ns=at(80))) == {Category.PROVISIONAL: 80}


def test_a_step_that_takes_many_times_the_usual_hung_and_so_did_those_who_waited_for_it() -> None:
    job, now = Job(), 0.0
    job.all(events.AttemptStart, 0, att="a1", world=2)
    for step in range(1, 21):
        slow = 30.0 if step == 10 else 0.0
        now += 1 + slow
        for rank in range(2):
            stay_s = 0.1 if rank == 1 else 0.1 + slow
            job.say(events.Step, now, att="a1", rank=rank, world=2, step=step, dur_s=1 + slow, coll_us=(round(stay_s * 1e6),))  # noqa: E501  # fmt: skip
    job.say(events.CkptCommit, now, att="a1", rank=0, world=2, step=20, ckpt="c")
    job.all(events.AttemptEnd, now, att="a1", world=2, cause="done")
    assert seconds(account(job.found)) == {Category.COMPUTE: 40, Category.HANG: 60}


def test_the_shortest_stay_in_a_collective_names_the_last_to_arrive_and_its_fetch_is_to_blame() -> None:
    job, now = Job(), 0.0
    job.all(events.AttemptStart, 0, att="a1", world=4)
    for step in range(1, 61):
        now += 0.115
        for rank in range(4):
            late = rank == 2 and step % 2 == 0
            stay_us = 1000 if late or step % 2 else 16_000
            job.say(
                events.Step, now, att="a1", rank=rank, world=4, step=step, dur_s=0.115, coll_us=(stay_us,),
                fetch_s=0.015 if late else 0.0, source="shard-7.tar" if late else "",
            )  # fmt: skip
    job.say(events.CkptCommit, now, att="a1", rank=0, world=4, step=60, ckpt="c")
    job.all(events.AttemptEnd, now, att="a1", world=4, cause="done")
    found = account(job.found)
    arrivals = found.arrivals
    assert (arrivals.num_steps, arrivals.num_notable, dict(arrivals.last)) == (60, 30, {2: 30})
    assert arrivals.fetch_ns[2] == arrivals.caused_ns[2] == 30 * 3 * 15 * 10**6
    assert arrivals.sources[2].most_common() == [("shard-7.tar", 30)]
    # 15 ms on one of four ranks: 11.25 ms a rank and step.
    assert found.totals[Category.STRAGGLER] == 30 * 3 * 15 * 10**6 == 30 * 4 * 11_250_000


def test_one_device_ten_percent_slow_makes_every_step_so() -> None:
    job, now = Job(), 0.0
    for step in range(1, 11):
        now += 1.1
        for rank in range(8):
            stay_us = 0 if rank == 5 else 100_000
            job.say(events.Step, now, att="a1", rank=rank, world=8, step=step, dur_s=1.1, coll_us=(stay_us,))
    job.say(events.CkptCommit, now, att="a1", rank=0, world=8, step=10, ckpt="c")
    job.all(events.AttemptEnd, now, att="a1", world=8, cause="done")
    found = account(job.found)
    others = found.segments.where(found.segments.device != 5)
    assert round(others.totals()[Category.COMPUTE] / sum(others.totals().values()), 3) == round(1 / 1.1, 3) == 0.909


def test_an_evaluation_and_a_save_inside_a_step_are_not_computing() -> None:
    job = Job()
    job.all(events.AttemptStart, 0, att="a1", world=1)
    job.say(events.PhaseBegin, 4, att="a1", rank=0, world=1, phase="eval")
    job.say(events.CkptBegin, 5, att="a1", rank=0, world=1, step=1, ckpt="c")
    job.say(events.CkptStaged, 6, att="a1", rank=0, world=1, step=1, ckpt="c", stall_s=1.0)
    job.say(events.PhaseEnd, 8, att="a1", rank=0, world=1, phase="eval")
    job.say(events.Step, 10, att="a1", rank=0, world=1, step=1, dur_s=10.0, fetch_s=2.0)
    job.say(events.CkptCommit, 10, att="a1", rank=0, world=1, step=1, ckpt="c")
    job.all(events.AttemptEnd, 10, att="a1", world=1, cause="done")
    assert seconds(account(job.found)) == {
        Category.FETCH: 2, Category.COMPUTE: 4, Category.EVAL: 3, Category.CKPT: 1,
    }  # fmt: skip


def test_a_wall_clock_that_is_set_back_during_a_save_does_not_make_it_end_before_it_began() -> None:
    job = Job()
    job.all(events.AttemptStart, 0, att="a1", world=2)
    now = steps(job, range(1, 11), start_s=0, world=2)
    job.all(events.CkptBegin, now, att="a1", world=2, step=10, ckpt="c")
    job.all(events.CkptStaged, now + 1, att="a1", world=2, step=10, ckpt="c", stall_s=1.0)
    job.say(events.CkptCommit, now + 9, att="a1", rank=0, world=2, step=10, ckpt="c")
    job.all(events.AttemptEnd, now + 9, att="a1", world=2, cause="done")
    set_back = [
        msgspec.structs.replace(event, wall_ns=event.wall_ns - 3600 * SECOND)
        if event.rank == 0 and event.seq > 11
        else event
        for event in job.found
    ]
    found = account(set_back)
    (save,) = found.saves
    assert (save.stall_ns, save.lag_ns) == (SECOND, 9 * SECOND)
    assert found.totals == account(job.found).totals
    advice = advice_of(found)
    assert advice is not None
    assert advice.lag_s == 9


def test_a_rank_killed_without_a_witness_died_within_one_usual_step() -> None:
    job = Job()
    job.all(events.AttemptStart, 0, att="a1", world=2)
    now = steps(job, range(1, 11), start_s=0, world=2)
    job.say(events.AttemptEnd, now + 30, att="a1", rank=1, world=2, cause="RuntimeError: timed out", code=1)
    found = account(job.found)
    assert seconds(found) == {Category.PROVISIONAL: 20, Category.LOST: 2, Category.DETECT: 58}
    assert found.failures[0].rank == 0


def test_nothing_at_all_is_an_account_too() -> None:
    assert account([]).paid_ns == 0


@st.composite
def any_events(draw: st.DrawFn) -> list[Event]:
    """Events that no sane job would write."""
    common = st.fixed_dictionaries(
        {
            "att": st.sampled_from(["a1", "a2", "a3"]),
            "node": st.sampled_from(["n0", "n1"]),
            "rank": st.integers(-1, 3),
            "world": st.integers(0, 4),
            "seq": st.integers(0, 30),
            "wall_ns": st.integers(0, 10**12),
            "mono_ns": st.integers(0, 10**12),
            "step": st.integers(-1, 12),
        }
    )
    some_s = st.floats(0, 500, allow_nan=False)
    kinds = st.one_of(
        st.builds(
            lambda d, f, w, c: (events.Step, {"dur_s": d, "fetch_s": f, "coll_wait_s": w, "coll_us": tuple(c)}),
            some_s,
            some_s,
            st.floats(-1, 50),
            st.lists(st.integers(0, 10**8), max_size=3),
        ),
        st.builds(lambda p: (events.PhaseBegin, {"phase": p}), st.sampled_from(["init", "eval", "x"])),
        st.builds(lambda p: (events.PhaseEnd, {"phase": p}), st.sampled_from(["init", "eval", "x"])),
        st.builds(lambda s: (events.CkptStaged, {"ckpt": "c", "stall_s": s}), some_s),
        st.just((events.CkptCommit, {"ckpt": "c"})),
        st.just((events.Restore, {"ckpt": "c"})),
        st.builds(lambda n: (events.Rollback, {"from_step": 12, "to_step": n}), st.integers(0, 12)),
        st.builds(lambda n: (events.Membership, {"n_devices": n}), st.integers(0, 6)),
        st.builds(lambda w: (events.Fail, {"kind": "exit", "died_wall_ns": w, "of_rank": 1}), st.integers(0, 10**12)),
        st.builds(lambda s: (events.Heartbeat, {"of_rank": 0, "state": s}), st.sampled_from(["R", "T", ""])),
        st.builds(lambda c: (events.AttemptEnd, {"cause": c}), st.sampled_from(["done", "error"])),
        st.builds(lambda p: (events.AttemptStart, {"launcher": "l", "process_start_ns": p}), st.integers(0, 10**12)),
        st.just((events.RunStart, {})),
        st.builds(
            lambda m, x: (events.StepLate, {"of_mono_ns": m, "exposed_s": x, "coll_us": (5,)}),
            st.integers(0, 10**12),
            st.floats(-1, 50),
        ),
    )
    return [
        kind(v=1, run="r", **head, **fields)
        for head, (kind, fields) in draw(st.lists(st.tuples(common, kinds), min_size=1, max_size=40))
    ]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_events(), st.one_of(st.none(), st.integers(0, 2 * 10**12)), st.randoms(use_true_random=False))
def test_the_partition_is_exact_and_free_of_order_for_any_events(
    found: list[Event], now_ns: int | None, chance: random.Random
) -> None:
    unique = list({(e.att, e.node, e.rank, e.seq): e for e in found}.values())
    one = account(unique, now_ns=now_ns)
    assert sum(one.totals.values()) == one.paid_ns
    assert one.paid_in(one.start_ns, one.end_ns) == one.paid_ns
    for device in set(one.segments.device.tolist()):  # each instant of each device has one category
        own = one.segments.of_device(device)
        spans = sorted(zip(own.start_ns.tolist(), own.end_ns.tolist(), strict=True))
        assert all(a < b for a, b in spans)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert one.steps.tokens_kept <= one.steps.tokens_issued
    shuffled = unique * 2
    chance.shuffle(shuffled)
    assert account(shuffled, now_ns=now_ns).totals == one.totals
    if one.end_ns > one.start_ns:
        middle = one.start_ns + (one.end_ns - one.start_ns) // 3
        both = [one.window(one.start_ns, middle), one.window(middle, one.end_ns)]
        assert {c: both[0][c] + both[1][c] for c in Category} == one.totals


def test_a_clock_that_runs_backwards_between_steps_costs_no_exactness() -> None:
    common = {"v": 1, "run": "r", "att": "a", "node": "n", "rank": 0, "world": 1, "wall_ns": at(0)}
    ends = [30.0, 60.0, 10.0, 10.5, 11.0, 90.0]
    found: list[Event] = [
        events.Step(**common, seq=seq, mono_ns=round(end_s * 1e9), step=seq + 1, dur_s=25.0, fetch_s=5.0)  # type: ignore[arg-type]
        for seq, end_s in enumerate(ends)
    ]
    found.append(events.CkptStaged(**common, seq=9, mono_ns=58 * 10**9, ckpt="c", stall_s=20.0))  # type: ignore[arg-type]
    one = account(found)
    assert sum(one.totals.values()) == one.paid_ns
    assert one.totals[Category.CKPT] == 20 * 10**9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8))
def test_kept_work_never_falls_but_by_a_rollback(parts: list[tuple[int, bool]]) -> None:
    job, now, step, kept = Job(), 0.0, 0, 0
    for count, commits in parts:
        now = steps(job, range(step + 1, step + count + 1), start_s=now, tokens=1)
        step += count
        if commits:
            job.say(events.CkptCommit, now, att="a1", rank=0, world=1, step=step, ckpt=str(step))
        found = account(job.found, now_ns=at(now))
        assert kept <= found.steps.tokens_kept <= found.steps.tokens_issued
        kept = found.steps.tokens_kept
    job.say(events.Rollback, now, att="a1", rank=0, world=1, from_step=step, to_step=0)
    assert account(job.found, now_ns=at(now)).steps.tokens_kept == 0


def test_two_reports_of_one_ranks_end_count_the_same_in_either_order() -> None:
    job = Job()
    job.all(events.AttemptStart, 0, att="a1", world=2)
    for rank, died_s in ((0, 5), (1, 9)):
        job.say(events.Fail, 10, att="a1", rank=rank, world=2, kind="exit", of_rank=1, died_wall_ns=at(died_s))
    assert account(job.found).totals == account(reversed(job.found)).totals
