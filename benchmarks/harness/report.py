"""The report: JSON with every repeat, and Markdown for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import LONGEST_FETCH, NOISY_CORES, OPENED, WAKE_UPS, phase_names
from benchmarks.harness.picture import draw
from benchmarks.harness.statistics import Spread, pairwise_ratio, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.harness.measurement import Failure, Measurement, Phase, Round

SCHEMA = 3


def _per_gigabyte(seconds: float, phase: Phase) -> float | None:
    return seconds / (phase.size_bytes / 1e9) if phase.size_bytes else None


FIGURES: dict[str, Callable[[Phase], float | None]] = {
    "samples/s": lambda phase: phase.samples_per_s,
    "samples/s from the open data set on": lambda phase: phase.opened_samples_per_s or phase.samples_per_s,
    "first batch s": lambda phase: phase.first_batch_s,
    "first batch s from the open data set on": lambda phase: phase.opened_first_batch_s,
    "waiting share": lambda phase: phase.waiting_share,
    "waiting share after the first batch": lambda phase: phase.later_waiting_share,
    "fetch p50 ms": lambda phase: None if phase.fetch_p50_s is None else phase.fetch_p50_s * 1e3,
    "fetch p99 ms": lambda phase: None if phase.fetch_p99_s is None else phase.fetch_p99_s * 1e3,
    "origin bytes / payload": lambda phase: phase.origin_bytes_per_payload_byte,
    "origin bytes / data set": lambda phase: phase.origin_bytes_per_stored_byte,
    "CPU s/GB": lambda phase: _per_gigabyte(phase.cpu_s.client + phase.cpu_s.daemon, phase),
    "RSS MB": lambda phase: sum(asdict(phase.peak_memory_bytes).values()) / 1e6,
    "RSS worker MB": lambda phase: phase.peak_memory_bytes.worker / 1e6 or None,
    "wall s": lambda phase: phase.wall_s,
    "longest wait s": lambda phase: phase.marks.get(LONGEST_FETCH),
    "wake-ups/s": lambda phase: None if WAKE_UPS not in phase.marks else phase.marks[WAKE_UPS] / phase.wall_s,
    "daemon CPU s/min": lambda phase: phase.cpu_s.daemon / phase.wall_s * 60,
}
"""What can be compared, or held against a bound: the figure of one phase of one run, ``None`` if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A figure that the scenario is about: a ratio of two contestants, or one contestant's own.

    Attributes:
        name: What it says.
        over: (label, phase) above the line.
        under: (label, phase) below it; ``None``: the figure itself is shown.
        target: Acceptable value, ``None`` if it is only shown.
        figure: Which of ``FIGURES``.
        at_most: Whether the target is the largest acceptable value instead of the least.
        goal: Which of ``benchmarks.summary.goals`` it answers, "" for none.
    """

    name: str
    over: tuple[str, str]
    under: tuple[str, str] | None
    target: float | None = None
    figure: str = "samples/s"
    at_most: bool = False
    goal: str = ""

    def __post_init__(self) -> None:
        if self.figure not in FIGURES:
            raise ValueError(f"{self.name}: no figure is called {self.figure!r}; there are {', '.join(FIGURES)}")

    def is_met(self, value: float) -> bool:
        """Whether ``value`` is acceptable."""
        return self.target is None or (value <= self.target if self.at_most else value >= self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a run of a scenario showed.

    Attributes:
        theme: Name of the scenario.
        machine: What the machine is called in public.
        date: ISO date.
        environment: From ``environment.describe``.
        parameters: Of the scenario.
        rounds: What was measured and what failed.
        comparisons: Ratios to compute within each round.
        notes: Sentences for the reader: method, states of caches, what to keep in mind.
    """

    theme: str
    machine: str
    date: str
    environment: dict[str, Any]
    parameters: dict[str, Any]
    rounds: Sequence[Round]
    comparisons: Sequence[Comparison]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def stem(self) -> str:
        """File name without suffix."""
        return f"{self.theme}_{self.machine}_{self.date}"

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both files, and a picture where matplotlib is installed.

        Returns:
            Paths of JSON and Markdown.
        """
        folder.mkdir(parents=True, exist_ok=True)
        data, text = folder / f"{self.stem}.json", folder / f"{self.stem}.md"
        data.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        picture = folder / f"{self.stem}.png"
        title = f"{self.theme} on {self.machine}: medians of {len(self.rounds)} rounds, least to most"
        is_drawn = bool(self.rounds) and draw(picture, self.rounds, title=title)
        text.write_text(self.markdown(picture=picture.name if is_drawn else ""))
        return data, text

    def ratios(self) -> list[tuple[Comparison, Spread]]:
        """The comparisons whose contestants ran and have the figure."""
        found = []
        for comparison in self.comparisons:
            over = self._figures(comparison, *comparison.over)
            if comparison.under is None:
                values = [value for value in over if value is not None]
                if values:
                    found.append((comparison, spread(values)))
                continue
            under = self._figures(comparison, *comparison.under)
            both = [(a, b) for a, b in zip(over, under, strict=True) if a is not None and b]
            if both:
                found.append((comparison, pairwise_ratio([a for a, _ in both], [b for _, b in both])))
        return found

    def _figures(self, comparison: Comparison, label: str, phase: str) -> list[float | None]:
        """By round, ``None`` where it failed or has no such figure."""
        figure = FIGURES[comparison.figure]
        found = [one.measured[label].phase(phase) if label in one.measured else None for one in self.rounds]
        return [None if one is None else figure(one) for one in found]

    def to_dict(self) -> dict[str, Any]:
        """Plain types: every repeat, then what was made of them."""
        return {
            "schema": SCHEMA,
            "theme": self.theme,
            "machine": self.machine,
            "date": self.date,
            "environment": self.environment,
            "parameters": self.parameters,
            "ratios": [
                {
                    "name": comparison.name,
                    "over": list(comparison.over),
                    "under": None if comparison.under is None else list(comparison.under),
                    "figure": comparison.figure,
                    "target": comparison.target,
                    "at_most": comparison.at_most,
                    "goal": comparison.goal,
                    "repeats": ratio.repeats,
                    "median": ratio.median,
                    "least": ratio.least,
                    "most": ratio.most,
                }
                for comparison, ratio in self.ratios()
            ],
            "notes": list(self.notes),
            "rounds": [
                {label: measurement.to_dict() for label, measurement in one.measured.items()} for one in self.rounds
            ],
            "failed": [{label: asdict(failure) for label, failure in one.failed.items()} for one in self.rounds],
        }

    def markdown(self, *, picture: str = "") -> str:
        """The report for people.

        Args:
            picture: File name of one to show, "" without.
        """
        lines = [f"# {self.theme} on {self.machine}, {self.date}", ""]
        lines += [f"Medians of {len(self.rounds)} interleaved rounds, with the range in brackets.", ""]
        if picture:
            lines += [f"![samples per second of all contestants]({picture})", ""]
        lines += self._ratio_table()
        lines += [*self._failures(), "", self._noise()]
        for phase in self._phase_names():
            lines += ["", f"## {phase}", "", *self._phase_table(phase), "", *self._cost_table(phase)]
        lines += ["", "## Contestants", "", *self._configurations()]
        lines += ["", "## Method", "", *(f"- {note}" for note in self.notes)]
        lines += ["", "## Environment", "", *_listing(self.environment), *_listing(self.parameters)]
        return "\n".join(lines) + "\n"

    def _noise(self) -> str:
        runs = [measurement for one in self.rounds for measurement in one.measured.values()]
        if not runs:
            return "Nothing was measured."
        thrown_away = sum(run.noisy_before for run in runs)
        cores = spread([run.other_cores for run in runs])
        noisy = sum(run.other_cores > NOISY_CORES for run in runs)
        return (
            f"Noise: {thrown_away} runs were thrown away and repeated because others used more than {NOISY_CORES} "
            f"cores; of the {len(runs)} that count, {noisy} were as noisy (others: median {cores.median:.2f}, most "
            f"{cores.most:.2f} cores)."
        )

    def _failures(self) -> list[str]:
        failures: dict[str, list[Failure]] = {}
        for one in self.rounds:
            for label, failure in one.failed.items():
                failures.setdefault(label, []).append(failure)
        rows = []
        for label, found in failures.items():
            counts = sum(label in one.measured for one in self.rounds)
            said = "; ".join(dict.fromkeys(map(str, found))).replace("|", "\\|")
            rows.append([label, f"{len(found)} of {len(found) + counts} runs", said])
        return ["", *_table(["failed", "in", "with"], rows)] if rows else []

    def _labels(self) -> list[str]:
        labels: dict[str, None] = {}
        for one in self.rounds:
            labels |= dict.fromkeys(one.measured) | dict.fromkeys(one.failed)
        return list(labels)

    def _first(self, label: str) -> Measurement | None:
        return next((one.measured[label] for one in self.rounds if label in one.measured), None)

    def _phases(self, label: str, name: str) -> list[Phase]:
        found = [one.measured[label].phase(name) for one in self.rounds if label in one.measured]
        return [phase for phase in found if phase is not None]

    def _phase_names(self) -> list[str]:
        return phase_names(self.rounds)

    def _ratio_table(self) -> list[str]:
        rows = []
        for comparison, ratio in self.ratios():
            verdict = ""
            if comparison.target is not None:
                verdict = "met" if comparison.is_met(ratio.median) else "**missed**"
            sign = "≤" if comparison.at_most else "≥"
            target = "" if comparison.target is None else f"{sign} {comparison.target:g}"
            rows.append([comparison.name, comparison.figure, _ranged(ratio, ".3g"), target, verdict])
        return _table(["ratio", "of", "measured", "target", ""], rows)

    def _phase_table(self, name: str) -> list[str]:
        def milliseconds(figure: Callable[[Phase], float | None]) -> Callable[[Phase], float | None]:
            return lambda phase: None if (value := figure(phase)) is None else value * 1e3

        columns: list[tuple[str, Callable[[Phase], float | None], str]] = [
            ("samples/s", lambda phase: phase.samples_per_s, ",.0f"),
            ("MB/s", lambda phase: phase.bytes_per_s / 1e6, ",.0f"),
            ("open s", lambda phase: phase.marks.get(OPENED), ".2f"),
            ("first batch s", lambda phase: phase.first_batch_s, ".2f"),
            ("after it, samples/s", lambda phase: phase.steady_samples_per_s, ",.0f"),
            ("fetch p50 ms", milliseconds(lambda phase: phase.fetch_p50_s), ".2f"),
            ("fetch p99 ms", milliseconds(lambda phase: phase.fetch_p99_s), ".2f"),
            ("waiting %", lambda phase: None if phase.waiting_share is None else phase.waiting_share * 100, ".2f"),
            ("origin bytes / payload", lambda phase: phase.origin_bytes_per_payload_byte, ".3f"),
            ("/ data set", lambda phase: phase.origin_bytes_per_stored_byte, ".3f"),
        ]
        return self._table_of(name, columns)

    def _cost_table(self, name: str) -> list[str]:
        columns: list[tuple[str, Callable[[Phase], float | None], str]] = [
            ("client CPU s/GB", lambda phase: _per_gigabyte(phase.cpu_s.client, phase), ".2f"),
            ("daemon CPU s/GB", lambda phase: _per_gigabyte(phase.cpu_s.daemon, phase), ".2f"),
            ("server CPU s/GB", lambda phase: _per_gigabyte(phase.cpu_s.server, phase), ".2f"),
            ("others, cores", lambda phase: phase.cpu_s.other / phase.wall_s, ".2f"),
            ("RSS main MB", lambda phase: phase.peak_memory_bytes.main / 1e6, ",.0f"),
            ("RSS worker MB", lambda phase: phase.peak_memory_bytes.worker / 1e6, ",.0f"),
            ("RSS daemon MB", lambda phase: phase.peak_memory_bytes.daemon / 1e6, ",.0f"),
        ]
        return self._table_of(name, columns)

    def _table_of(self, name: str, columns: list[tuple[str, Callable[[Phase], float | None], str]]) -> list[str]:
        rows = []
        for label in self._labels():
            phases = self._phases(label, name)
            if not phases:
                if self._first(label) is None:
                    rows.append([label, "failed", *["–"] * (len(columns) - 1)])
                continue
            cells = [label]
            for _, figure, form in columns:
                values = [value for phase in phases if (value := figure(phase)) is not None]
                cells.append(_ranged(spread(values), form) if values else "–")
            rows.append(cells)
        return _table(["contestant", *(heading for heading, _, _ in columns)], rows)

    def _configurations(self) -> list[str]:
        lines = []
        for label in self._labels():
            measurement = self._first(label)
            if measurement is None:
                continue
            settings = "; ".join(f"{name}: {value}" for name, value in measurement.configuration.items())
            caches = "; ".join(f"{phase.name}: {phase.page_cache}" for phase in measurement.phases)
            lines.append(f"- **{label}**. {settings}. Page cache: {caches}.")
        return lines


def _ranged(figure: Spread, form: str) -> str:
    middle = format(figure.median, form)
    if figure.repeats == 1 or format(figure.least, form) == format(figure.most, form):
        return middle
    return f"{middle} [{figure.least:{form}}–{figure.most:{form}}]"


def _table(headings: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(headings) + " |",
        "| " + " | ".join(["---"] * len(headings)) + " |",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _listing(values: dict[str, Any]) -> list[str]:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {inner}" for name, inner in value.items())
        if isinstance(value, list):
            return ", ".join(f"{inner:.2f}" if isinstance(inner, float) else str(inner) for inner in value)
        return str(value)

    return [f"- {name.replace('_', ' ')}: {text(value)}" for name, value in values.items()]
