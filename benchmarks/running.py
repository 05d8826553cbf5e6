"""Running one scenario, or one program, and writing its report."""

from __future__ import annotations

import datetime
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import environment, free_memory
from benchmarks.harness.report import Report
from benchmarks.harness.runner import ROOT, Runner
from benchmarks.harness.stopping import Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.harness.measurement import Round
    from benchmarks.scenarios.scenario import Prepared, Scenario
    from benchmarks.schedule import Part

PROGRAM_TIMEOUT_S = 3600.0
_TAIL_LINES = 12


class NothingChosen(Exception):
    """``only`` names none of the contestants; says which there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to run, whatever is run.

    Attributes:
        machine: Its name in the report.
        output: Where reports go.
        work: Directory on the disk under test.
        repeats: Interleaved rounds.
        small: Whether this is a smoke run.
        only: Parts of the names of the contestants that shall run; all if empty.
        timeout_s: Longest time of one run.
        calm_timeout_s: Longest wait for a calm machine before a run.
        noisy_retries: Repeats of a run that others disturbed.
        say: Where progress goes.
        stop: Told when this program shall leave.
    """

    machine: str
    output: Path
    work: Path
    repeats: int = 5
    small: bool = False
    only: Sequence[str] = ()
    timeout_s: float = 120.0
    calm_timeout_s: float = 20.0
    noisy_retries: int = 2
    say: Callable[[str], None] = field(default=print)
    stop: Stop = field(default_factory=Stop)

    @property
    def mark(self) -> str:
        """Goes into the names of a smoke run's reports."""
        return "-small" if self.small else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What became of one part.

    Attributes:
        report: Its JSON, ``None`` if it wrote none.
        said: A sentence for the summary.
        missing: Contestants whose failure is the benchmark's: the product and the ceilings.
    """

    report: Path | None
    said: str
    missing: Sequence[str] = ()


def owed_failures(rounds: Sequence[Round], *, peers: set[str]) -> list[str]:
    """Labels of those whose failure is the benchmark's: the product and the ceilings."""
    return sorted({label for one in rounds for label in one.failed} - peers)


def run_scenario(part: Part, settings: Settings, *, budget_s: float = math.inf) -> Ran:
    """Run all rounds, or as many as the budget allows, and write the report.

    Args:
        part: Which.
        settings: How.
        budget_s: Time for preparation and rounds; the first round always runs.

    Raises:
        NothingChosen: No contestant matches.
        KeyboardInterrupt, SystemExit: It was stopped; a report of the complete rounds has been written.
    """
    scenario: Scenario = import_module(part.module).SCENARIO
    chosen = [label for label in scenario.labels if not settings.only or any(one in label for one in settings.only)]
    if not chosen:
        raise NothingChosen(f"--only matches none of: {'; '.join(scenario.labels)}")
    begin, repeats = time.monotonic(), part.rounds(settings.repeats)
    settings.work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{part.theme}-", dir=settings.work))
    surroundings = environment.describe(folder, repository=ROOT)
    rounds: list[Round] = []
    stopped: BaseException | None = None
    try:
        settings.say(f"preparing {part.theme} (data set and store)")
        with scenario.prepare(folder / "scenario", small=settings.small) as prepared:
            entries = [entry for entry in prepared.entries if entry.label in chosen]
            runner = Runner(
                folder / "runs",
                before_each=prepared.before_each,
                timeout_s=settings.timeout_s,
                calm_timeout_s=0 if settings.small else settings.calm_timeout_s,
                noisy_retries=0 if settings.small else settings.noisy_retries,
                memory_bytes=0 if settings.small else free_memory.SIZE_BYTES,
                say=settings.say,
            )
            left_s = budget_s - (time.monotonic() - begin)
            try:
                with settings.stop:
                    for done in runner.rounds(entries, repeats=repeats, budget_s=left_s):
                        rounds.append(done)
                        settings.stop.check()
            except (KeyboardInterrupt, SystemExit) as stop:
                if not rounds:
                    raise
                stopped = stop
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    surroundings |= {"load_after": list(os.getloadavg())}
    report = _report(scenario, prepared, rounds, settings, repeats=repeats, surroundings=surroundings)
    data, _ = report.write(settings.output)
    settings.say(f"wrote {data}")
    for comparison, ratio in report.ratios():
        target = "" if comparison.target is None else f" (target {comparison.target:g})"
        settings.say(f"{comparison.name}: {ratio.median:.2f} [{ratio.least:.2f}–{ratio.most:.2f}]{target}")
    if stopped is not None:
        raise stopped
    missing = owed_failures(rounds, peers={entry.label for entry in entries if entry.is_peer})
    failed = sorted({label for one in rounds for label in one.failed})
    said = f"{len(rounds)} of {repeats} rounds in {(time.monotonic() - begin) / 60:.1f} min"
    return Ran(report=data, said=said + (f"; failed: {', '.join(failed)}" if failed else ""), missing=missing)


def _report(
    scenario: Scenario,
    prepared: Prepared,
    rounds: Sequence[Round],
    settings: Settings,
    *,
    repeats: int,
    surroundings: dict[str, object],
) -> Report:
    notes = [*prepared.notes]
    if len(rounds) < repeats:
        notes.append(f"The run was stopped after {len(rounds)} of {repeats} rounds.")
    return Report(
        theme=scenario.theme + settings.mark,
        machine=settings.machine,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        environment=surroundings,
        parameters=prepared.parameters,
        rounds=rounds,
        comparisons=prepared.comparisons,
        notes=notes,
    )


def run_program(part: Part, settings: Settings) -> Ran:
    """Run ``python -m module`` and find the report that it writes."""
    begin = time.monotonic()
    command = [sys.executable, "-m", part.module, *part.arguments, "--machine", settings.machine]
    command += ["--output", str(settings.output)] + (["--small"] if settings.small else [])
    settings.say(f"running {part.module} {' '.join(part.arguments)}")
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )  # fmt: skip
    settings.say("\n".join(done.stdout.splitlines()[-_TAIL_LINES:]))
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    report = settings.output / f"{part.theme}{settings.mark}_{settings.machine}_{date}.json"
    took = f"in {(time.monotonic() - begin) / 60:.1f} min"
    if done.returncode == 0 and report.exists():
        return Ran(report=report, said=took)
    return Ran(
        report=report if report.exists() else None,
        said=f"ended with status {done.returncode} {took}",
        missing=[part.theme],
    )
