"""Reports of programs that have neither contestants nor rounds: what was found, and on which machine."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import environment
from benchmarks.harness.runner import ROOT

if TYPE_CHECKING:
    import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every such program has: ``--small``, ``--machine``, ``--output``."""
    parser.add_argument("--small", action="store_true", help="a smoke run; its figures mean nothing")
    parser.add_argument("--machine", default=f"{len(os.sched_getaffinity(0))}-core-vm", help="its name in the report")
    parser.add_argument("--output", type=Path, help="where a report goes (default: none is written)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a program has to say.

    Attributes:
        theme: Its name.
        says: A sentence about how it was found.
        figures: One row of plain values for each case.
    """

    theme: str
    says: str
    figures: list[dict[str, Any]]

    def write(self, options: argparse.Namespace) -> None:
        """Write ``THEME_MACHINE_DATE.json`` and ``.md`` where ``--output`` says, or nothing."""
        if options.output is None:
            return
        date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        stem = f"{self.theme}{'-small' if options.small else ''}_{options.machine}_{date}"
        surroundings = environment.describe(ROOT, repository=ROOT)
        options.output.mkdir(parents=True, exist_ok=True)
        content = {"environment": surroundings, "figures": self.figures}
        (options.output / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
        names = list(self.figures[0])
        lines = [f"# {self.theme} on {options.machine}, {date}", "", self.says, ""]
        lines += ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "| --- " * len(names) + "|"]
        lines += ["| " + " | ".join(_text(row[name]) for name in names) + " |" for row in self.figures]
        lines += ["", *(f"- {name}: {value}" for name, value in surroundings.items())]
        (options.output / f"{stem}.md").write_text("\n".join(lines) + "\n")


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
