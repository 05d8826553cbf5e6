"""``python -m benchmarks``: run scenarios, write their reports and, of a profile, the summary."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.runner import COMPILED_VARIABLE, NOT_COMPILED_VARIABLE, ROOT
from benchmarks.harness.stopping import Stop
from benchmarks.running import NothingChosen, Ran, Settings, run_program, run_scenario
from benchmarks.schedule import PARTS, PROFILES, SCENARIOS, shares_s, table
from benchmarks.summary.document import summarize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.schedule import Part


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 if the product or a ceiling failed (a peer may: the report says so), 2 for a wrong command line."""
    options = _parser().parse_args(arguments)
    stop = Stop()
    stop.listen()
    work = options.work or ROOT / ".bench"
    work.mkdir(parents=True, exist_ok=True)
    with stop, _compiled_once(work):
        return _run(options, _settings(options, work=work, stop=stop))


@contextmanager
def _compiled_once(work: Path) -> Iterator[None]:
    """Let each interpreter compile its modules once for all that is started here, and leave none of it behind."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="compiled-", dir=work, ignore_cleanup_errors=True) as folder:
        os.environ.pop(NOT_COMPILED_VARIABLE, None)
        os.environ[COMPILED_VARIABLE] = folder
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def _settings(options: argparse.Namespace, *, work: Path, stop: Stop) -> Settings:
    return Settings(
        machine=options.machine,
        output=options.output,
        work=work,
        repeats=options.repeats,
        small=options.small,
        only=options.only or (),
        timeout_s=options.timeout,
        calm_timeout_s=options.calm_timeout,
        noisy_retries=options.noisy_retries,
        say=_say,
        stop=stop,
    )


def _run(options: argparse.Namespace, settings: Settings) -> int:
    if options.profile is None:
        try:
            return _status(run_scenario(SCENARIOS[options.scenario], settings), options.scenario)
        except NothingChosen as error:
            print(error, file=sys.stderr)
            return 2
    parts = [PARTS[theme] for theme in PROFILES[options.profile] if not options.part or theme in options.part]
    _say(table(parts, repeats=options.repeats))
    budget_s = math.inf if options.budget is None else options.budget * 60
    return _run_all(parts, settings, budget_s=budget_s)


def _run_all(parts: Sequence[Part], settings: Settings, *, budget_s: float) -> int:
    """One part after the other; what fails does not keep the others from running."""
    begin, status = time.monotonic(), 0
    reports: dict[str, Path] = {}
    said: dict[str, str] = {}
    for number, part in enumerate(parts):
        spent_s = time.monotonic() - begin
        left_min = sum(one.estimate_s(settings.repeats) for one in parts[number:]) / 60
        share_s = shares_s(parts[number:], repeats=settings.repeats, budget_s=budget_s - spent_s)
        share = "" if math.isinf(share_s) else f", {share_s / 60:.1f} of them for this part"
        place = f"part {number + 1} of {len(parts)}, {spent_s / 60:.1f} min spent"
        _say(f"\n== {part.theme}: {place}, about {left_min:.0f} to go{share}")
        try:
            if budget_s - spent_s < part.least_s:
                ran = Ran(report=None, said="left out, since no time was left")
            elif part.is_program:
                ran = run_program(part, settings)
            else:
                ran = run_scenario(part, settings, budget_s=share_s)
        except Exception as error:  # noqa: BLE001  (the others are still worth their time)
            traceback.print_exc()
            ran = Ran(report=None, said=f"failed: {type(error).__name__}", missing=[part.theme])
        status = max(status, _status(ran, part.theme))
        said[part.theme] = ran.said
        if ran.report is not None:
            reports[part.theme] = ran.report
        # After each part, so that a stop leaves a summary of what was measured until then.
        date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        summary = summarize(reports, machine=settings.machine, date=date, parts=said)
        written = summary.write(settings.output, mark=settings.mark)
    _say(f"wrote {written[0]} after {(time.monotonic() - begin) / 60:.1f} min")
    return status


def _status(ran: Ran, theme: str) -> int:
    for label in ran.missing:
        print(f"{theme}: {label} failed; the report says how", file=sys.stderr, flush=True)
    return 1 if ran.missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run scenarios and write their reports.")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="two-epochs", help="one scenario alone")
    parser.add_argument(
        "--profile", choices=sorted(PROFILES), help="many of them, and a summary: what targets speak of, or all"
    )
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="of the profile, these alone")
    parser.add_argument(
        "--budget", type=float, metavar="MINUTES", help="of a profile: rounds that would end after that are not begun"
    )
    parser.add_argument("--repeats", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--small", action="store_true", help="a smoke run of some seconds; its figures mean nothing")
    parser.add_argument("--only", action="append", metavar="TEXT", help="contestants whose name contains TEXT")
    parser.add_argument("--machine", default=f"{len(os.sched_getaffinity(0))}-core-vm", help="its name in the report")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "reports", help="where reports go")
    parser.add_argument("--work", type=Path, help="directory on the disk under test (default .bench)")
    parser.add_argument("--timeout", type=float, default=120.0, help="longest time of one run, in seconds")
    parser.add_argument("--calm-timeout", type=float, default=20.0, help="longest wait for a calm machine before a run")
    parser.add_argument(
        "--noisy-retries", type=int, default=2, help="repeats of a run that others disturbed (default 2)"
    )
    return parser


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
