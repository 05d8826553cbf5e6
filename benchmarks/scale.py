"""How cost grows: ``python -m benchmarks.scale`` measures CPU time against shards, samples and ranks, and fits it.

Nothing is read and nobody waits: the arithmetic of the order, and the daemon's planner driven by its simulator. So CPU
time of this process is all there is to measure, and other load on the machine hardly changes it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from cacheloader_daemon.simulator.node import SimulatedNode
from cacheloader_daemon.simulator.settings import Settings

from benchmarks.harness import environment
from benchmarks.harness.runner import ROOT
from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPEATS = 5
SHORT = 8
FLAT = 0.1
"""Exponent up to which a cost counts as constant: doubling the size adds less than 7 %."""

BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One cost against one size.

    Attributes:
        what: The cost.
        against: The size.
        unit: Of the cost.
        sizes: Where it was measured.
        costs: Least of the repeats, which other load can only raise.
        hot: Whether it is paid for each batch; else once a session or once an epoch.
        why: What explains the growth.
    """

    what: str
    against: str
    unit: str
    sizes: list[int]
    costs: list[float]
    hot: bool
    why: str

    @property
    def exponent(self) -> float:
        """Slope of log cost over log size in the upper half of the sizes: 0 is constant, 1 is linear."""
        half = len(self.sizes) // 2
        x = [math.log(size) for size in self.sizes[half:]]
        y = [math.log(cost) for cost in self.costs[half:]]
        return float(np.polyfit(x, y, 1)[0])


def least_cpu_s(work: Callable[[], object], *, times: int = 1) -> float:
    """CPU seconds of one call: the least of several repeats of ``times`` calls, of many where calls are short."""
    found = []
    for _ in range(REPEATS * (SHORT if times > 1 else 1)):
        begin = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - begin) / times)
    return max(min(found), 1e-9)


def order_curves(axis: str, cases: Sequence[tuple[int, int, int, int]]) -> list[Curve]:
    """Costs of the order.

    Args:
        axis: What grows.
        cases: Its size, shards, samples per shard, ranks.
    """
    building, batches, plans = [], [], []
    for _, shards, samples_per_shard, ranks in cases:
        counts = np.full(shards, samples_per_shard, dtype=np.int64)
        options = OrderOptions(seed=1, lanes=ranks)
        building.append(least_cpu_s(lambda counts=counts, options=options: SampleOrder(counts, options)) * 1e3)
        order = SampleOrder(counts, options)
        batch = BATCH * ranks
        row = order.rows_per_epoch // 2 // order.rows_per_step(batch) * order.rows_per_step(batch)

        def next_batch(order: SampleOrder = order, row: int = row, batch: int = batch, ranks: int = ranks) -> object:
            return order.batch(epoch=1, row=row, global_batch=batch, rank=ranks // 2, world_size=ranks)

        def plan(order: SampleOrder = order, row: int = row, batch: int = batch, ranks: int = ranks) -> object:
            return order.accesses(epoch=1, from_row=row, global_batch=batch, rank=ranks // 2, world_size=ranks)

        next_batch()  # what an epoch keeps is made once
        batches.append(least_cpu_s(next_batch, times=20) * 1e6)
        plans.append(least_cpu_s(plan) * 1e3)
    sizes = [case[0] for case in cases]
    return [
        Curve(
            what=f"places of a batch of {BATCH}, in the middle of an epoch", against=axis, unit="µs", sizes=sizes,
            costs=batches, hot=True, why="counter-based permutations: a place is computed, never looked up or replayed",
        ),
        Curve(
            what="making the order", against=axis, unit="ms", sizes=sizes, costs=building, hot=False,
            why="one permutation of all shards, once in each process",
        ),
        Curve(
            what="a rank's plan of the rest of an epoch", against=axis, unit="ms", sizes=sizes, costs=plans, hot=False,
            why="one entry for each shard that the rank still meets, once an epoch",
        ),
    ]  # fmt: skip


def planner_curve(sizes: Sequence[int], *, num_shards: int) -> Curve:
    """CPU time of the daemon's planner by event, against sessions that share one data set, half of it cached."""
    costs = []
    for sessions in sizes:
        node = SimulatedNode(
            Settings(
                num_shards=num_shards,
                shard_bytes=64 << 20,
                samples_per_shard=64,
                cache_bytes=num_shards * (64 << 20) // 2,
                samples_per_s=sessions * 1e4,
                bandwidth_bytes_per_s=1e12,
                num_ranks=sessions,
                batch_size=64,
                shuffle_window=1,
                num_epochs=2,
            )
        )
        planner = node.planner
        handle, spent_s, events = planner.handle, 0.0, 0

        def counted(event: object, now_s: float, handle: Callable[..., object] = handle) -> object:
            nonlocal spent_s, events
            begin = time.process_time()
            answer = handle(event, now_s)
            spent_s += time.process_time() - begin
            events += 1
            return answer

        planner.handle = counted  # type: ignore[method-assign, assignment]
        for _ in node.run():
            pass
        costs.append(spent_s / events * 1e6)
    return Curve(
        what=f"the daemon's planner, an event, {num_shards:,} shards",
        against="sessions",
        unit="µs",
        sizes=list(sizes),
        costs=costs,
        hot=True,
        why="heaps of next uses; an event touches its own session and one shard, but with each new plan all plans are "
        "looked at once, to see who shares shards: that is what grows",
    )


def measure(*, small: bool) -> list[Curve]:
    """All curves."""
    top = 4 if small else 6
    shards = [(10**p, 10**p, 1000, 1) for p in range(2, top + 1)]
    samples = [(10**p, 10_000, 10**p // 10_000, 1) for p in range(6, 7 + top - 2)]
    ranks = [(4**p, 100_000, 10_000, 4**p) for p in range(4 if small else 7)]
    sessions = [4**p for p in range(3 if small else 5)]
    return [
        *order_curves("shards", shards),
        *order_curves("samples, in 10,000 shards", samples),
        *order_curves("ranks, 1e9 samples in 100,000 shards", ranks),
        planner_curve(sessions, num_shards=1024 if small else 2048),
    ]


def markdown(curves: Sequence[Curve], *, title: str, surroundings: dict[str, object]) -> str:
    """The report for people."""
    lines = [f"# {title}", "", " ".join((__doc__ or "").split("\n\n", 1)[1].split()), ""]
    lines += [
        f"Least CPU time of {REPEATS} repeats, of {REPEATS * SHORT} where one takes microseconds. "
        "The exponent is the slope of log cost over log size in the upper half:"
    ]
    lines += ["0 is constant, 1 is linear.", ""]
    lines += ["| cost | against | paid | exponent | measured | because |", "| --- | --- | --- | --- | --- | --- |"]
    for curve in curves:
        points = ", ".join(
            f"{size:,}: {cost:,.3g}" if size < 10_000 else f"{size:.3g}: {cost:,.3g}"
            for size, cost in zip(curve.sizes, curve.costs, strict=True)
        )
        paid = "each batch" if curve.hot else "once a process or an epoch"
        lines.append(
            f"| {curve.what} | {curve.against} | {paid} | {curve.exponent:.2f} | {points} {curve.unit} | {curve.why} |"
        )
    lines += ["", *(f"- {name}: {value}" for name, value in surroundings.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description="How cost grows with shards, samples and ranks.")
    parser.add_argument("--small", action="store_true", help="a smoke run of seconds")
    parser.add_argument("--machine", default=f"{len(os.sched_getaffinity(0))}-core-vm", help="its name in the report")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "reports", help="where the report goes")
    options = parser.parse_args()
    curves = measure(small=options.small)
    surroundings = environment.describe(ROOT, repository=ROOT)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    stem = f"scale{'-small' if options.small else ''}_{options.machine}_{date}"
    options.output.mkdir(parents=True, exist_ok=True)
    content = {
        "environment": surroundings,
        "curves": [asdict(curve) | {"exponent": curve.exponent} for curve in curves],
        "ratios": [
            {
                "name": f"{curve.what}, against {curve.against}",
                "target": FLAT,
                "at_most": True,
                "goal": "scale",
                "median": curve.exponent,
                "least": curve.exponent,
                "most": curve.exponent,
                "repeats": REPEATS,
            }
            for curve in curves
            if curve.hot and curve.against.startswith(("shards", "samples"))
        ],
    }
    (options.output / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    text = markdown(curves, title=f"scale on {options.machine}, {date}", surroundings=surroundings)
    (options.output / f"{stem}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
