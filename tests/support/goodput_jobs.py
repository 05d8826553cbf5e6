"""Made-up jobs: scripts of what every rank does, second by second, as the events that it would have written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cacheloader.goodput import events

if TYPE_CHECKING:
    from cacheloader.goodput.events import Event

START_S = 1_700_000_000
SECOND = 10**9


@dataclass
class Job:
    """Events of one run; every time is in seconds since its begin."""

    found: list[Event] = field(default_factory=list)
    first_seq: int = 0
    _seq: dict[tuple[str, int], int] = field(default_factory=dict)

    def say(self, event: type, at_s: float, /, *, att: str, rank: int, world: int, **fields: Any) -> None:
        key = (att, rank)
        self._seq[key] = self._seq.get(key, self.first_seq - 1) + 1
        at_ns = round(at_s * SECOND)
        self.found.append(
            event(
                v=1,
                run="made-up",
                att=att,
                node="n0",
                rank=rank,
                world=world,
                seq=self._seq[key],
                wall_ns=START_S * SECOND + at_ns,
                mono_ns=at_ns + 77 * SECOND * (rank + 2),  # each process has a clock of its own
                boot="b",
                **fields,
            )
        )

    def all(self, event: type, at_s: float, /, *, att: str, world: int, **fields: Any) -> None:
        for rank in range(world):
            self.say(event, at_s, att=att, rank=rank, world=world, **fields)


def end_to_end_vector() -> list[Event]:
    """8 devices; init 60 s; 10 s steps, 1 s of it fetch; a save each 20; death 7 s into step 95; resume at 81."""
    job, world = Job(), 8
    job.say(events.RunStart, 0, att="a1", rank=0, world=world)
    now = 0.0
    for att, first, last in (("a1", 1, 94), ("a2", 81, 100)):
        job.all(events.AttemptStart, now, att=att, world=world, launcher="l")
        job.all(events.PhaseBegin, now, att=att, world=world, phase="init")
        now += 60 if att == "a1" else 38
        job.all(events.PhaseEnd, now, att=att, world=world, phase="init")
        if att == "a2":
            job.all(events.Restore, now, att=att, world=world, step=80, ckpt="step-80", world_old=8)
        commits: list[tuple[float, int]] = []
        for step in range(first, last + 1):
            now += 10
            while commits and commits[0][0] <= now:
                job.say(events.CkptCommit, commits[0][0], att=att, rank=0, world=world, step=commits[0][1], ckpt=f"step-{commits[0][1]}")  # noqa: E501  # fmt: skip
                del commits[0]
            job.all(events.Step, now, att=att, world=world, step=step, dur_s=10.0, fetch_s=1.0, tokens=125)
            if step % 20 == 0:
                job.all(events.CkptBegin, now, att=att, world=world, step=step, ckpt=f"step-{step}")
                commits.append((now + 15 if step < 100 else now + 5, step))
                now += 5
                job.all(events.CkptStaged, now, att=att, world=world, step=step, ckpt=f"step-{step}", stall_s=5.0)
        if att == "a1":
            died = now + 7
            now = died + 9
            job.say(events.Fail, now, att=att, rank=0, world=world, kind="exit", of_rank=3, first_seen_by="launcher", died_wall_ns=(START_S * SECOND + round(died * SECOND)))  # noqa: E501  # fmt: skip
            now += 270
            for rank in range(world):
                if rank != 3:
                    job.say(events.AttemptEnd, now, att=att, rank=rank, world=world, cause="SIGTERM", code=-15)
            now += 43
        else:
            job.say(events.CkptCommit, now, att=att, rank=0, world=world, step=100, ckpt="step-100")
            job.all(events.AttemptEnd, now, att=att, world=world, cause="done")
    return job.found
