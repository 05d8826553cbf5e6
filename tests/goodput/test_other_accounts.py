"""The same events, told to ml-goodput-measurement and to us.

Its answers were seen with release 0.2.3. To see them again, install it into an environment of its own and name that
environment's interpreter in CACHELOADER_ML_GOODPUT_PYTHON; without, only our side is checked.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from cacheloader.goodput import events
from cacheloader.goodput.categories import Category
from cacheloader.goodput.ledger import Ledger
from tests.support.goodput_jobs import SECOND, START_S, Job, end_to_end_vector

ASK = Path(__file__).parent / "others" / "ml_goodput.py"


def ours(found: list[Any], **options: Any) -> Any:
    ledger = Ledger()
    ledger.add(found)
    return ledger.account(**options)


def theirs(found: list[Any], *, until_s: float, window: tuple[float, float] | None = None) -> dict[str, Any] | None:
    """What the tool makes of rank 0's events; it knows starts of steps and of the job, and the initialisation."""
    python = os.environ.get("CACHELOADER_ML_GOODPUT_PYTHON")
    if not python:
        return None
    told: list[tuple[Any, ...]] = []
    for event in (event for event in found if event.rank == 0):
        at_s = event.wall_ns / SECOND - START_S
        match event:
            case events.AttemptStart():
                told.append(("job_start", at_s))
            case events.PhaseBegin(phase="init"):
                told.append(("tpu_init_start", at_s))
            case events.PhaseEnd(phase="init"):
                told.append(("tpu_init_end", at_s))
            case events.Step():
                told.append(("step_start", at_s - event.dur_s, event.step))
            case events.RunEnd():
                told.append(("job_end", at_s))
            case _:
                pass
    question = {"events": told, "until": until_s, **({"window": window} if window else {})}
    done = subprocess.run(
        [python, str(ASK)], input=json.dumps(question), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def loop(*, num_steps: int, dur_s: float = 1.0, fetch_s: float = 0.0, hang_at: int = 0, hang_s: float = 0.0) -> Job:
    job, now = Job(), 0.0
    job.say(events.AttemptStart, 0, att="a1", rank=0, world=1)
    for step in range(1, num_steps + 1):
        extra_s = hang_s if step == hang_at else 0.0
        now += dur_s + extra_s
        job.say(events.Step, now, att="a1", rank=0, world=1, step=step, dur_s=dur_s + extra_s, fetch_s=fetch_s)
    return job


def test_the_end_to_end_vector_is_56_53_percent_here_and_64_38_there() -> None:
    found = [*end_to_end_vector(), _run_end(1592, att="a2")]
    assert round(100 * ours(found).goodput_time, 2) == 56.53
    answer = theirs(found, until_s=1592)
    if answer is not None:
        assert round(answer["goodput"], 2) == 64.38


def test_a_run_that_died_long_after_its_last_commit_is_36_percent_here_and_100_there() -> None:
    job = loop(num_steps=100)
    job.say(events.CkptCommit, 36, att="a1", rank=0, world=1, step=36, ckpt="step-36")
    job.say(events.AttemptEnd, 100, att="a1", rank=0, world=1, cause="out of memory", code=1)
    found = ours(job.found)
    assert found.goodput_time == 0.36
    assert found.totals[Category.PROVISIONAL] == 64 * SECOND
    answer = theirs([*job.found, _run_end(100)], until_s=100)
    if answer is not None:
        assert round(answer["goodput"]) in (99, 100)  # the last step has no successor that would end it


def test_a_loop_that_waits_for_80_percent_of_its_time_is_20_percent_here_and_99_6_there() -> None:
    job = loop(num_steps=250, fetch_s=0.8)
    job.say(events.CkptCommit, 250, att="a1", rank=0, world=1, step=250, ckpt="step-250")
    found = ours(job.found, now_ns=(START_S + 250) * SECOND)
    assert round(found.goodput_time, 6) == 0.2
    assert found.totals[Category.FETCH] == 200 * SECOND
    answer = theirs(job.found, until_s=250)
    if answer is not None:
        assert round(answer["goodput"], 1) == 99.6


def test_a_window_during_a_hang_is_unproductive_here_and_100_percent_there() -> None:
    job = loop(num_steps=100)
    job.say(events.CkptCommit, 100, att="a1", rank=0, world=1, step=100, ckpt="step-100")
    found = ours(job.found, now_ns=(START_S + 400) * SECOND)
    window = found.window((START_S + 90) * SECOND, (START_S + 390) * SECOND)
    assert window[Category.COMPUTE] == 10 * SECOND
    assert window[Category.DETECT] == 275 * SECOND
    answer = theirs(job.found, until_s=400, window=(90, 390))
    if answer is not None:
        assert round(answer["goodput"], 1) == 100.0


def test_a_hang_that_is_over_stays_unproductive_here_and_becomes_100_percent_there() -> None:
    job = loop(num_steps=120, hang_at=100, hang_s=300)
    job.say(events.CkptCommit, 420, att="a1", rank=0, world=1, step=120, ckpt="step-120")
    found = ours(job.found, now_ns=(START_S + 420) * SECOND)
    assert round(found.goodput_time, 4) == round(120 / 420, 4)
    assert found.totals[Category.HANG] == 300 * SECOND
    answer = theirs(job.found, until_s=420)
    if answer is not None:
        assert answer["goodput"] > 99


def _run_end(at_s: float, *, att: str = "a1") -> events.RunEnd:
    job = Job(first_seq=10**6)
    job.say(events.RunEnd, at_s, att=att, rank=0, world=1)
    return job.found[0]
