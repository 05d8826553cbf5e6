"""What it costs to record a run: the same loop with and without ``goodput.Run``, step by step in turn.

``python -m benchmarks.overhead`` prints JSON and ends with 1 if the median step got 0.5 % longer, in the median of
five repeats; with ``--work matmul``, if it took that much more processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import cacheloader as cl
from benchmarks.harness.findings import Findings, add_options
from cacheloader.goodput.measuring import HostClock, Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT = 0.005
SMALL_STEPS = 20


def measure(*, num_steps: int, step_s: float, work: str) -> dict[str, Any]:
    """Run ``num_steps`` steps of each kind, in turn."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    tensor = torch.ones(8)
    step = _sleeping(step_s) if work == "sleep" else _multiplying(step_s)
    walls: dict[str, list[float]] = {"bare": [], "recorded": []}
    costs: dict[str, list[float]] = {"bare": [], "recorded": []}
    bare_reduce = dist.all_reduce
    with (
        tempfile.TemporaryDirectory() as folder,
        cl.goodput.Run(folder, rank=0, world_size=1, attempt="bench", meter=Meter(HostClock())) as run,
    ):
        recorded: Iterator[Any] = run.timed(iter(range(10**9)), tokens=4096, samples=8)
        plain: Iterator[Any] = iter(range(10**9))
        for number in range(2 * (num_steps + 5)):
            kind, batches, reduce = (
                ("bare", plain, bare_reduce) if number % 2 else ("recorded", recorded, dist.all_reduce)
            )
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            next(batches)
            step()
            reduce(tensor)
            if number >= 10:
                walls[kind].append(time.perf_counter() - begin)
                costs[kind].append(time.thread_time() - begin_cpu)
    dist.destroy_process_group()
    bare, with_run = (statistics.median(walls[kind]) for kind in ("bare", "recorded"))
    cost_us = 1e6 * (statistics.median(costs["recorded"]) - statistics.median(costs["bare"]))
    pairs = [b / a - 1 for a, b in zip(walls["bare"], walls["recorded"], strict=True)]
    return {
        "steps_of_each": num_steps,
        "work": work,
        "median_bare_s": bare,
        "median_recorded_s": with_run,
        "slower_by": with_run / bare - 1,
        "median_of_pairs": statistics.median(pairs),
        "cpu_us_a_step": cost_us,
        "cpu_share": cost_us / 1e6 / step_s,
        "limit": LIMIT,
    }


def _sleeping(step_s: float) -> Callable[[], None]:
    return lambda: time.sleep(step_s)


def _multiplying(step_s: float) -> Callable[[], None]:
    torch.set_num_threads(1)
    matrix = torch.rand(192, 192)

    def once() -> None:
        torch.mm(matrix, matrix)

    begin = time.thread_time()  # of wall time, others on the machine take a part
    for _ in range(200):
        once()
    count = max(1, round(step_s * 200 / (time.thread_time() - begin)))

    def step() -> None:
        for _ in range(count):
            once()

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of each kind (default 200)")
    parser.add_argument("--repeats", type=int, default=5, help="how often all of that (default 5)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="duration of a step (default 50)")
    parser.add_argument("--work", choices=("sleep", "matmul"), default="sleep", help="what a step does")
    add_options(parser)
    options = parser.parse_args()
    num_steps = min(options.steps, SMALL_STEPS) if options.small else options.steps
    runs = [
        measure(num_steps=num_steps, step_s=options.step_ms / 1000, work=options.work)
        for _ in range(1 if options.small else options.repeats)
    ]
    # A computing step's wall time varies by far more than the limit where others compute, too.
    judged = "slower_by" if options.work == "sleep" else "cpu_share"
    shares = sorted(run[judged] for run in runs)
    median = statistics.median(shares)
    found = f"{judged}: {median:.2%} [{shares[0]:.2%} – {shares[-1]:.2%}], median of {len(runs)}"
    print(json.dumps(runs, indent=1), found, sep="\n")
    says = (
        "The same loop of steps with and without `goodput.Run`, step by step in turn, a row for each repeat. "
        f"`{judged}` shall be below {LIMIT:.1%} in their median. {found}."
    )
    Findings(theme=f"overhead-{options.work}", says=says, figures=runs).write(options)
    return 1 if not options.small and median > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
