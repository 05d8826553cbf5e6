"""What is measured inside a step, by real ranks that meet over gloo."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cacheloader as cl
from cacheloader.goodput import events, recorder
from cacheloader.goodput.categories import Category
from cacheloader.goodput.folder import EventFolder
from cacheloader.goodput.histogram import Durations, bucket
from cacheloader.goodput.ledger import Ledger
from cacheloader.goodput.measuring import Meter
from cacheloader.goodput.stragglers import NOTABLE_SHARE
from tests.support.parent_death import die_with_parent

SCRIPT = Path(__file__).parents[1] / "support" / "goodput_ranks.py"
REPOSITORY = Path(__file__).parents[2]


def run_ranks(folder: Path, world: int, **config: Any) -> list[Any]:
    """Run ``world`` processes to their end and read what they wrote."""
    path = folder / "config.json"
    path.write_text(json.dumps({"folder": str(folder / "run"), **config}))
    processes = [
        subprocess.Popen(
            die_with_parent([sys.executable, "-P", str(SCRIPT), str(path)]),
            env={
                **os.environ,
                "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon",
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
            },
        )
        for rank in range(world)
    ]
    try:
        assert [process.wait(270) for process in processes] == [0] * world
    finally:
        for process in processes:
            process.kill()
            process.wait(60)
    return EventFolder(folder / "run").read()


class Witness:
    """What the ranks saw themselves: of each step and rank, between which two times it waited for the others, seconds.

    That is how much longer than the shortest it stayed in the step's collectives. The two differ by where a rank was
    held up: by a moment on a quiet machine, by seconds on one that is busy.
    """

    EXACT_S = 1e-4
    """The meter writes whole microseconds."""

    def __init__(self, folder: Path, world: int) -> None:
        ranks = [json.loads((folder / f"run.stays-{rank}.json").read_text()) for rank in range(world)]
        self.steps = [[self._waits(own, stays) for own in stays] for stays in zip(*ranks, strict=True)]

    def _waits(self, own: list[tuple[float, float]], stays: tuple[Any, ...]) -> tuple[float, float]:
        low = high = 0.0
        for place, (inner_s, outer_s) in enumerate(own):
            low += max(0.0, inner_s - min(rank[place][1] for rank in stays))
            high += max(0.0, outer_s - min(rank[place][0] for rank in stays))
        return low - self.EXACT_S, high + self.EXACT_S

    def waited(self, rank: int) -> tuple[float, float]:
        """Over all steps."""
        return sum(step[rank][0] for step in self.steps), sum(step[rank][1] for step in self.steps)

    def times_last(self, rank: int, dur_s: list[float]) -> tuple[int, int]:
        """How often it was last for certain, so late that it counts, and how often that may be so."""
        certain = possible = 0
        for step, notable_s in zip(self.steps, (NOTABLE_SHARE * own_s for own_s in dur_s), strict=True):
            low, high = step[rank]
            others = step[:rank] + step[rank + 1 :]
            certain += high < min(o[0] for o in others) and max(o[0] for o in others) - high >= notable_s
            possible += low <= min(o[1] for o in others) and max(o[1] for o in others) - low >= notable_s
        return certain, possible


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ddp", "world"), [(False, 4), (True, 2)])
def test_the_late_rank_is_found_without_comparing_clocks_or_sending_anything(
    tmp_path: Path, ddp: bool, world: int
) -> None:
    late = world // 2
    found = run_ranks(tmp_path, world, steps=13, late_rank=late, late_s=0.2, ddp=ddp)
    witness = Witness(tmp_path, world)
    ledger = Ledger()
    ledger.add(found)
    account = ledger.account()
    assert sum(account.totals.values()) == account.paid_ns
    arrivals = account.arrivals
    assert arrivals.num_steps == 13
    # On a quiet machine: the late rank is last in 12 steps, and the others wait 200 ms for it in each. A loaded one may
    # make any rank late, now and then; whoever it was in truth is named, and whoever waited in truth has waited.
    for rank in range(world):
        dur_s = [event.dur_s for event in found if isinstance(event, events.Step) and event.rank == rank]
        certain, possible = witness.times_last(rank, dur_s)
        assert certain <= arrivals.last[rank] <= possible
        own = account.segments.of_device(rank).totals()
        waited_s, hung_s = own[Category.STRAGGLER] / 1e9, own[Category.HANG] / 1e9
        low_s, high_s = witness.waited(rank)
        # Where a rank is held up for very long, waiting for it is hanging.
        assert low_s - hung_s <= waited_s <= high_s
    tails = [event for event in found if isinstance(event, events.Collectives)]
    assert {event.op for event in tails} == ({"ddp_all_reduce"} if ddp else {"all_reduce", "barrier"})


class _Late:
    """A device's clock: knows the time between two marks only when it has come by, three steps later."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_marks = 0

    def mark(self) -> tuple[int, float]:
        self.num_marks += 1
        return self.num_marks, self.now

    def elapsed_s(self, begin: tuple[int, float], end: tuple[int, float]) -> float | None:
        return end[1] - begin[1] if self.num_marks >= end[0] + 6 else None


def test_a_devices_idle_time_comes_some_steps_later_and_is_what_counts_as_exposed(tmp_path: Path) -> None:
    clock = _Late()
    with cl.goodput.Run(tmp_path, rank=0, world_size=1, meter=Meter(clock)) as run:
        loader = object()
        for number in range(40):
            run.fetching(loader)
            clock.now += 0.25 if number % 2 else 0.0  # in every other step the device still had work meanwhile
            run.fetched(loader, 1.0, 1)
    found = EventFolder(tmp_path).read()
    late = [event for event in found if isinstance(event, events.StepLate)]
    assert len(late) >= 30
    steps = {event.mono_ns: event for event in found if isinstance(event, events.Step)}
    assert all(event.exposed_s == (0.25 if steps[event.of_mono_ns].step % 2 == 0 else 0.0) for event in late)


def test_collectives_of_an_evaluation_or_a_save_are_not_those_of_a_step(tmp_path: Path) -> None:
    import torch.distributed as dist

    before = dist.barrier
    meter = Meter()
    with cl.goodput.Run(tmp_path, rank=0, world_size=1, meter=meter) as run:
        assert dist.barrier is not before
        with run.eval():
            assert not meter._counts
        assert meter._counts
        recorder.ckpt_begin("step-1", 1)
        assert not meter._counts
        recorder.ckpt_staged("step-1", 1, stall_s=0.0)
        assert meter._counts
    assert dist.barrier is before


@given(st.lists(st.floats(1e-7, 1e4), min_size=1, max_size=200), st.lists(st.floats(1e-7, 1e4), max_size=50))
def test_quantiles_of_merged_histograms_are_right_to_4_4_percent(one: list[float], two: list[float]) -> None:
    left, right = Durations(), Durations()
    for value in one:
        left.add(value)
    for value in two:
        right.add(value)
    left.merge(right)
    values = sorted([*one, *two])
    for share in (0.5, 0.99, 1.0):
        truth = values[math.ceil(share * len(values)) - 1]
        assert left.quantile(share) == pytest.approx(truth, rel=0.0445)
        assert left.quantile(share) <= values[-1]
    assert [seconds for _, seconds in left.top] == sorted(values, reverse=True)[:16]


@given(st.floats(1e-9, 1e6))
def test_a_bucket_holds_what_lies_between_its_edges(value: float) -> None:
    index = bucket(value)
    assert 2 ** (index / 8) < value * (1 + 1e-12)
    assert value <= 2 ** ((index + 1) / 8) * (1 + 1e-12)
