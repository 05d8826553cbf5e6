"""``python -m benchmarks``: run a scenario and write its report."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import environment
from benchmarks.harness.report import Report
from benchmarks.harness.runner import ROOT, Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness.measurement import Round
    from benchmarks.scenarios.scenario import Scenario

SCENARIOS = {
    "checkpoint": "benchmarks.scenarios.checkpoint",
    "decode": "benchmarks.scenarios.decode",
    "fetch-cost": "benchmarks.scenarios.fetch_cost",
    "position": "benchmarks.scenarios.position",
    "sharing": "benchmarks.scenarios.sharing",
    "small-samples": "benchmarks.scenarios.small_samples",
    "stall": "benchmarks.scenarios.stall",
    "recovery": "benchmarks.scenarios.recovery",
    "two-epochs": "benchmarks.scenarios.two_epochs",
    "volume": "benchmarks.scenarios.volume",
}

ALL = "all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 if the product or a ceiling failed (a peer may: the report says so), 2 for a wrong command line."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _leave)
    names = sorted(SCENARIOS) if options.scenario == ALL else [options.scenario]
    return max(_run(name, options) for name in names)


def _run(name: str, options: argparse.Namespace) -> int:
    scenario: Scenario = import_module(SCENARIOS[name]).SCENARIO
    chosen = [label for label in scenario.labels if not options.only or any(part in label for part in options.only)]
    if not chosen:
        print(f"--only matches none of: {'; '.join(scenario.labels)}", file=sys.stderr)
        return 2
    work = options.work or ROOT / ".bench"
    work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=work))
    surroundings = environment.describe(folder, repository=ROOT)
    try:
        _say(f"preparing {name} (data set and store)")
        with scenario.prepare(folder / "scenario", small=options.small) as prepared:
            entries = [entry for entry in prepared.entries if entry.label in chosen]
            runner = Runner(
                folder / "runs",
                before_each=prepared.before_each,
                timeout_s=options.timeout,
                calm_timeout_s=0 if options.small else options.calm_timeout,
                noisy_retries=0 if options.small else options.noisy_retries,
                say=_say,
            )
            rounds: list[Round] = []
            stopped: BaseException | None = None
            try:
                for done in runner.rounds(entries, repeats=options.repeats):
                    rounds.append(done)  # noqa: PERF402  (kept one by one: what is complete outlives a stop)
            except (KeyboardInterrupt, SystemExit) as stop:
                if not rounds:
                    raise
                stopped = stop
        notes = [*prepared.notes]
        if stopped is not None:
            notes.append(f"The run was stopped after {len(rounds)} of {options.repeats} rounds.")
        report = Report(
            theme=scenario.theme + ("-small" if options.small else ""),
            machine=options.machine,
            date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            environment=surroundings | {"load_after": list(os.getloadavg())},
            parameters=prepared.parameters,
            rounds=rounds,
            comparisons=prepared.comparisons,
            notes=notes,
        )
        for path in report.write(options.output):
            _say(f"wrote {path}")
        for comparison, ratio in report.ratios():
            target = "" if comparison.target is None else f" (target {comparison.target:g})"
            _say(f"{comparison.name}: {ratio.median:.2f} [{ratio.least:.2f}–{ratio.most:.2f}]{target}")
        if stopped is not None:
            raise stopped
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    missing = owed_failures(rounds, peers={entry.label for entry in entries if entry.is_peer})
    for label in missing:
        print(f"{name}: {label} failed; the report says how", file=sys.stderr)
    return 1 if missing else 0


def owed_failures(rounds: Sequence[Round], *, peers: set[str]) -> list[str]:
    """Labels of those whose failure is the benchmark's: the product and the ceilings."""
    return sorted({label for one in rounds for label in one.failed} - peers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run a scenario and write its report.")
    parser.add_argument("--scenario", choices=[ALL, *sorted(SCENARIOS)], default="two-epochs")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--small", action="store_true", help="a smoke run of some seconds; its figures mean nothing")
    parser.add_argument("--only", action="append", metavar="TEXT", help="contestants whose name contains TEXT")
    parser.add_argument("--machine", default=f"{len(os.sched_getaffinity(0))}-core-vm", help="its name in the report")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "reports", help="where reports go")
    parser.add_argument("--work", type=Path, help="directory on the disk under test (default .bench)")
    parser.add_argument("--timeout", type=float, default=300.0, help="longest time of one run, in seconds")
    parser.add_argument("--calm-timeout", type=float, default=20.0, help="longest wait for a calm machine before a run")
    parser.add_argument(
        "--noisy-retries", type=int, default=2, help="repeats of a run that others disturbed (default 2)"
    )
    return parser


def _leave(number: int, _frame: object) -> None:
    # As an exception, so that servers and contestants are ended and scratch files removed on the way out.
    sys.exit(128 + number)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
