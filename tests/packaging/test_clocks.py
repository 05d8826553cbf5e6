"""Somebody sets the clock, and nothing waits longer: every duration is measured on a clock that nobody can set."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow"}

STAMPS = {
    "cacheloader/checkpoint": "when a checkpoint was saved, for people",
    "cacheloader/goodput": "when an event happened, for people and for putting machines' events side by side",
    "cacheloader/lines.py": "when an event or a step happened, beside the monotonic clock",
    "cacheloader/origin/aws_credentials.py": "the end of credentials is a time of day, as the store names it",
    "cacheloader/world.py": "the name of an attempt",
    "daemon/cacheloader_daemon/store/residents.py": "the order of use over restarts, made monotonic where it is drawn",
    "daemon/cacheloader_daemon/store/scrub.py": "where in its month-long round a scrub is; its rests are bounded",
    "daemon/cacheloader_daemon/watching.py": "when a rank did something, beside the monotonic clock",
}
"""Where the wall clock may be read, and what for."""


def wall_clock_reads(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in WALL_CLOCK
    ]


def sources() -> list[Path]:
    return [path for folder in ("cacheloader", "daemon") for path in sorted((REPOSITORY / folder).rglob("*.py"))]


def test_the_wall_clock_is_read_for_stamps_only() -> None:
    found = [line for path in sources() for line in wall_clock_reads(path)]
    assert found, "the search finds nothing at all"
    assert [line for line in found if not line.startswith(tuple(STAMPS))] == []


@pytest.mark.parametrize("place", STAMPS)
def test_every_exception_is_still_one(place: str) -> None:
    paths = [path for path in sources() if str(path.relative_to(REPOSITORY)).startswith(place)]
    assert any(wall_clock_reads(path) for path in paths)
