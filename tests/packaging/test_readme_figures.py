"""The speeds that the README names are those of the report that it links."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """The linked one."""
    [stem] = set(re.findall(r"\(benchmarks/reports/(two-epochs_[^)]+)\.md\)", README))
    return json.loads((ROOT / "benchmarks" / "reports" / f"{stem}.json").read_text())


@pytest.fixture(scope="module")
def medians(report: dict[str, Any]) -> dict[str, float]:
    """Median of each of its ratios, by name."""
    return {ratio["name"]: ratio["median"] for ratio in report["ratios"]}


@pytest.mark.parametrize(
    ("row", "names", "form"),
    [
        ("the same engine that writes the bare bytes to files",
         ["cold, 2 workers / engine", "cold from the open data set on, 2 workers / engine"], ".2f"),
        ("cold .*? webdataset with its cache", ["cold, 2 workers / webdataset cache_dir"], ".1f"),
        (r"`os\.pread` of the same ranges in a bare loop", ["warm, 0 workers / pread"], ".2f"),
        ("the same in two processes", ["warm, 2 workers / pread, 2 processes"], ".2f"),
        ("same in two processes.*? webdataset with its cache", ["warm, 2 workers / webdataset cache_dir"], ".0f"),
    ],
)  # fmt: skip
def test_a_speed_in_the_readme_stands_in_its_report(
    row: str, names: list[str], form: str, medians: dict[str, float]
) -> None:
    shown = re.search(rf"{row} \|([^|\n]*)\|", README, re.DOTALL)
    assert shown, row
    assert re.findall(r"\d+(?:\.\d+)?", shown[1]) == [format(medians[name], form) for name in names]


def test_the_readme_says_how_many_rounds_its_medians_are_of(report: dict[str, Any]) -> None:
    numbers = {"three": 3, "four": 4, "five": 5}
    [said] = re.findall(r"medians of (\w+) interleaved rounds", README)
    assert numbers[said] == len(report["rounds"])
