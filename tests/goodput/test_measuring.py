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
from tests.support.seaweedfs import free_ports

SCRIPT = Path(__file__).parents[1] / "support" / "goodput_ranks.py"
REPOSITORY = Path(__file__).parents[2]


def run_ranks(folder: Path, world: int, **config: Any) -> list[Any]:
    """Run ``world`` processes to their end and read what they wrote."""
    port = next(free_ports())
    path = folder / "config.json"
    path.write_text(json.dumps({"folder": str(folder / "run"), **config}))
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), str(path)],
            env={
                **os.environ,
                "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon",
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(world)
    ]
    try:
        assert [process.wait(100) for process in processes] == [0] * world
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    return EventFolder(folder / "run").read()


@pytest.mark.parametrize(("ddp", "world"), [(False, 4), (True, 2)])
def test_the_late_rank_is_found_without_comparing_clocks_or_sending_anything(
    tmp_path: Path, ddp: bool, world: int
) -> None:
    late = world // 2
    found = run_ranks(tmp_path, world, steps=13, late_rank=late, late_s=0.2, ddp=ddp)
    ledger = Ledger()
    ledger.add(found)
    account = ledger.account()
    assert sum(account.totals.values()) == account.paid_ns
    arrivals = account.arrivals
    assert arrivals.num_steps == 13
    assert arrivals.last.most_common(1)[0][0] == late
    assert arrivals.last[late] >= 9  # a loaded machine may make another one late, now and then
    # The others wait 200 ms in each of 12 steps, the late one does not.
    waited_s = [account.segments.of_device(rank).totals()[Category.STRAGGLER] / 1e9 for rank in range(world)]
    assert waited_s.pop(late) < 0.7 * 12 * 0.2 < min(waited_s)
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
