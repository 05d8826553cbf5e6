"""``python -m benchmarks.pressure``: measure all cases and write the report; some twenty minutes."""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import environment
from benchmarks.harness.runner import ROOT
from benchmarks.harness.stopping import Stop
from benchmarks.pressure import report
from benchmarks.pressure.measuring import Case, Outcome, measure
from benchmarks.pressure.stage import Shape, stock
from cacheloader.demo.seaweedfs import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.pressure.stage import Stocked

SLOW_PART = 0.02
PARTS = (0.25, 0.5, 0.75, 0.9)
BYTES = Shape(num_shards=400, samples_per_shard=8, sample_bytes=32 * 1024 - 512)
STALLS = Shape(num_shards=600, samples_per_shard=4, sample_bytes=256 * 1024 - 512, batches_per_shard=1)
"""A step takes long (200 ms), so that what reading itself takes hardly shows beside it. For shards of 1 MiB a
reservation is a fifth more than they take; for smaller ones it is so much more that it would be what is measured."""
SMALL = Shape(num_shards=100, samples_per_shard=4, sample_bytes=16 * 1024 - 512)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pressure", description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it run at all? its figures mean little")
    parser.add_argument("--only", choices=("bytes", "stalls"), help="one of the two tables")
    parser.add_argument("--machine", default=f"{len(os.sched_getaffinity(0))}-core-vm", help="its name in the report")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "reports", help="where reports go")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench", help="directory on the disk under test")
    options = parser.parse_args(arguments)
    stop = Stop()
    stop.listen()
    with stop:
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    options.work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="pressure-", dir=options.work))
    surroundings = environment.describe(folder, repository=ROOT)
    (folder / "store").mkdir()
    server = SeaweedServer(folder / "store")
    bytes_of: list[Outcome] = []
    stalls: list[Outcome] = []
    try:
        server.start()
        if options.only != "stalls":
            shape, epoch_s = (SMALL, 1.0) if options.small else (BYTES, 4.0)
            stocked = stock(server, shape)
            # What is read does not depend on how busy the machine is.
            bytes_of = _measured(folder, "bytes", stocked, _bytes_cases(epoch_s), at_once=os.cpu_count() or 1)
        if options.only != "bytes":
            shape, epoch_s = (SMALL, 2.0) if options.small else (STALLS, 120.0)
            stocked = stock(server, shape)
            cases = _stall_cases(epoch_s)
            # All at the same time, each with daemon, cache and link of its own: they sleep, and one that never waits
            # for the link shows what the machine took from all of them.
            stalls = _measured(folder, "stall", stocked, cases, at_once=len(cases))
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    part = f"-{options.only}" if options.only else ""
    name = f"pressure{part}{'-small' if options.small else ''}_{options.machine}_{date}"
    surroundings |= {"load_after": list(os.getloadavg())}
    for path in report.write(options.output, name=name, surroundings=surroundings, bytes_of=bytes_of, stalls=stalls):
        print(f"wrote {path}")
    return 0


def _measured(folder: Path, name: str, stocked: Stocked, cases: Sequence[Case], *, at_once: int) -> list[Outcome]:
    """Each case in a process of its own."""
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(measure, folder / f"{name}-{number}", stocked, case) for number, case in enumerate(cases)]
        return [_told(run.result()) for run in runs]


def _bytes_cases(epoch_s: float) -> list[Case]:
    one = [
        Case(name=f"one job, {label}", cached=cached, eviction=eviction, epoch_s=epoch_s)
        for cached in PARTS
        for eviction, label in (("plan", "planned"), ("lru", "LRU"))
    ]
    two = [
        Case(name=f"two jobs, {label}", cached=0.5, eviction=eviction, epoch_s=epoch_s, num_jobs=2)
        for eviction, label in (("plan", "planned"), ("lru", "LRU"))
    ]
    return one + two


def _stall_cases(epoch_s: float) -> list[Case]:
    enough = Case(name="a link that suffices", cached=0.5, bandwidth=0.6, epoch_s=epoch_s, num_epochs=3)
    narrow = Case(name="too narrow a link", cached=0.5, bandwidth=0.4, epoch_s=epoch_s, num_epochs=3)
    return [
        Case(name="all in the cache", cached=1.1, epoch_s=epoch_s, num_epochs=3),
        narrow,
        replace(narrow, name="the same, slow answers", slow_answers=SLOW_PART),
        replace(narrow, name="the same, and second requests", slow_answers=SLOW_PART, hedge_share=0.05),
        Case(name="too narrow a link", cached=0.75, bandwidth=0.2, epoch_s=epoch_s, num_epochs=3),
        enough,
        replace(enough, name="the same, LRU", eviction="lru", num_epochs=2),
        replace(enough, name="the same, slow answers", slow_answers=SLOW_PART),
        replace(enough, name="the same, and second requests", slow_answers=SLOW_PART, hedge_share=0.05),
    ]


def _told(outcome: Outcome) -> Outcome:
    print(
        f"{outcome.case.name}, c={outcome.cached_bytes / outcome.dataset_bytes:.3f}: "
        f"{outcome.bytes_per_epoch / outcome.dataset_bytes:.3f} D (simulated "
        f"{outcome.simulated_bytes / outcome.dataset_bytes:.3f}), waiting {outcome.stall:.1%} (simulated "
        f"{outcome.simulated_stall:.1%}, least {outcome.least_stall:.1%})",
        flush=True,
    )
    return outcome


if __name__ == "__main__":
    sys.exit(main())
