"""Making the summary from the reports of one call."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.summary.asides import asides
from benchmarks.summary.goals import GOALS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.summary.goals import Goal

REASONS = Path(__file__).with_name("reasons.toml")
NOT_MEASURED = "not measured"
MET, MISSED = "met", "missed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One target and what was found.

    Attributes:
        goal: Its key.
        says: The target in words.
        bound: Such as ``"≥ 2"``, "" if nothing was measured.
        verdict: ``"met"``, ``"missed"`` or ``"not measured"``.
        comparison: Which of several comparisons came out worst; the others are at least as good.
        median: Of it, ``None`` if nothing was measured.
        least: Smallest of all rounds.
        most: Largest of all rounds.
        rounds: How many there were.
        reason: Why it was missed, as far as anybody knows.
        report: File name of the report, "" if nothing was measured.
    """

    goal: str
    says: str
    bound: str = ""
    verdict: str = NOT_MEASURED
    comparison: str = ""
    median: float | None = None
    least: float | None = None
    most: float | None = None
    rounds: int = 0
    reason: str = ""
    report: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All targets.

    Attributes:
        machine: What the machine is called in public.
        date: ISO date.
        rows: In the order of ``GOALS``.
        besides: What has no target: theme, what was measured, figure.
        parts: For each scenario of the call, in a sentence: how long it took, or how it failed.
        environment: Of the last report: commit, packages, machine.
    """

    machine: str
    date: str
    rows: Sequence[Row]
    besides: Sequence[tuple[str, str, str]]
    parts: Mapping[str, str]
    environment: Mapping[str, Any]

    def write(self, folder: Path, *, mark: str = "") -> list[Path]:
        """Write JSON and Markdown.

        Args:
            folder: Where the reports lie.
            mark: Goes into the file names, such as ``"-small"``.
        """
        stem = f"summary{mark}_{self.machine}_{self.date}"
        paths = [folder / f"{stem}.md", folder / f"{stem}.json"]
        paths[0].write_text(self.markdown())
        paths[1].write_text(json.dumps(asdict(self), indent=1) + "\n")
        return paths

    def markdown(self) -> str:
        """For people."""
        counts = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in (MET, MISSED, NOT_MEASURED)}
        lines = [
            f"# All targets on {self.machine}, {self.date}",
            "",
            f"{counts[MET]} met, {counts[MISSED]} missed, {counts[NOT_MEASURED]} not measured in this call. Where "
            "several comparisons belong to a target, such as one for each peer, the worst is shown. Medians over "
            "rounds of ratios within a round, with the range in brackets; the reports say how they were made.",
            "",
            "| target | bound | measured | of | rounds | | report |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(_line(row) for row in self.rows),
            "",
        ]
        reasons = [f"- **{row.says}**: {row.reason}" for row in self.rows if row.verdict == MISSED]
        if reasons:
            lines += ["## Why targets were missed", "", *reasons, ""]
        if self.besides:
            lines += ["## Without a target", "", "| measured | | in |", "| --- | --- | --- |"]
            lines += [f"| {what} | {figure} | {theme} |" for theme, what, figure in self.besides] + [""]
        lines += ["## What ran", "", *(f"- {name}: {said}" for name, said in self.parts.items()), ""]
        shown = ("commit", "dirty", "cpu_model", "cores", "kernel", "filesystem", "load_before", "load_after")
        lines += [
            "## Environment",
            "",
            *(f"- {name}: {self.environment[name]}" for name in shown if name in self.environment),
        ]
        return "\n".join(lines) + "\n"


def summarize(reports: Mapping[str, Path], *, machine: str, date: str, parts: Mapping[str, str]) -> Summary:
    """Read the reports of this call and hold every target against them.

    Args:
        reports: JSON files by theme, of this call alone: what did not run now is not measured.
        machine: What the machine is called in public.
        date: ISO date.
        parts: What became of each scenario.
    """
    contents = {theme: json.loads(path.read_text()) for theme, path in reports.items()}
    reasons = {key: " ".join(text.split()) for key, text in tomllib.loads(REASONS.read_text()).items()}
    rows = []
    for goal in GOALS:
        content = contents.get(goal.theme)
        found = [] if content is None else _found(goal, content)
        rows.append(_row(goal, found, report=reports[goal.theme].name, reasons=reasons) if found else _unmeasured(goal))
    environment: Mapping[str, Any] = next((one["environment"] for one in reversed(contents.values())), {})
    return Summary(
        machine=machine, date=date, rows=rows, besides=list(asides(contents)), parts=parts, environment=environment
    )


def _unmeasured(goal: Goal) -> Row:
    return Row(goal=goal.key, says=goal.says)


def _found(goal: Goal, content: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        ratio for ratio in content.get("ratios", ()) if ratio.get("goal") == goal.key and ratio["target"] is not None
    ]


def _row(goal: Goal, found: list[dict[str, Any]], *, report: str, reasons: Mapping[str, str]) -> Row:
    worst = min(found, key=_margin)
    is_met = worst["median"] <= worst["target"] if worst["at_most"] else worst["median"] >= worst["target"]
    return Row(
        goal=goal.key,
        says=goal.says,
        bound=f"{'≤' if worst['at_most'] else '≥'} {worst['target']:g}",
        verdict=MET if is_met else MISSED,
        comparison=worst["name"],
        median=worst["median"],
        least=worst["least"],
        most=worst["most"],
        rounds=worst["repeats"],
        reason="" if is_met else reasons.get(goal.key, "not known yet"),
        report=report,
    )


def _margin(ratio: dict[str, Any]) -> float:
    """How far inside its bound a figure is; below 1 it is outside."""
    median, target = ratio["median"], ratio["target"]
    if ratio["at_most"] and median <= 0:
        return float("inf")
    over, under = (target, median) if ratio["at_most"] else (median, target)
    return over / under if under else float("inf")


def _line(row: Row) -> str:
    if row.median is None:
        return f"| {row.says} | | | | | {NOT_MEASURED} | |"
    measured = f"{row.median:.3g} [{row.least:.3g}–{row.most:.3g}]"
    report = row.report.removesuffix(".json")
    verdict = row.verdict if row.verdict == MET else f"**{row.verdict}**"
    cells = [row.says, row.bound, measured, row.comparison, str(row.rounds), verdict, f"[{report}]({report}.md)"]
    return f"| {' | '.join(cells)} |"
