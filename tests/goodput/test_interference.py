"""Steps beside an upload against the others, in made-up jobs whose truth is known."""

from __future__ import annotations

from cacheloader.goodput import events
from cacheloader.goodput.interference import interference
from cacheloader.goodput.ledger import Ledger
from tests.support.goodput_jobs import SECOND, Job


def job_with_uploads(*, slow_s: float) -> Job:
    """40 steps on two ranks, and saves whose uploads cover six steps each, which take ``slow_s`` longer than 1 s."""
    job, now = Job(), 0.0
    job.all(events.AttemptStart, 0, att="a1", world=2)
    uploading: list[tuple[int, float]] = []
    for step in range(1, 41):
        now += 1 + (slow_s if uploading else 0)
        job.all(events.Step, now, att="a1", world=2, step=step, dur_s=1 + (slow_s if uploading else 0))
        if uploading and step == uploading[0][0] + 6:
            saved, _ = uploading.pop()
            job.say(events.CkptCommit, now, att="a1", rank=0, world=2, step=saved, ckpt=str(saved))
        if step in (10, 30):
            job.all(events.CkptBegin, now, att="a1", world=2, step=step, ckpt=str(step))
            job.all(events.CkptStaged, now + 0.5, att="a1", world=2, step=step, ckpt=str(step), stall_s=0.5)
            now += 0.5
            uploading.append((step, now))
    job.say(events.CkptBegin, now, att="a1", rank=0, world=2, step=40, ckpt="40")
    job.say(events.CkptCommit, now, att="a1", rank=0, world=2, step=40, ckpt="40")
    job.all(events.AttemptEnd, now, att="a1", world=2, cause="done")
    return job


def test_steps_during_an_upload_cost_the_difference_of_the_medians_times_their_number() -> None:
    ledger = Ledger()
    ledger.add(job_with_uploads(slow_s=0.25).found)
    found = interference(ledger.account())
    assert found.is_known
    assert (found.during_steps, found.clear_steps) == (24, 56)
    assert (found.during_ns, found.clear_ns) == (1.25 * SECOND, SECOND)
    assert found.cost_ns == 24 * 0.25 * SECOND
    assert found.jitter_ns == 0


def test_uploads_that_disturb_nobody_cost_nothing_and_without_uploads_nothing_is_known() -> None:
    ledger = Ledger()
    ledger.add(job_with_uploads(slow_s=0).found)
    assert interference(ledger.account()).cost_ns == 0
    assert not interference(Ledger().account()).is_known
