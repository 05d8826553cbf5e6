"""What really happened to the ranks of ``goodput_trainer.py``, by their own clocks and by who watched them."""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cacheloader.goodput.categories import Category
from tests.support.node_daemon import is_running

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.counting_proxy import CountingProxy

THROTTLED = "throttled"
"""The file that says that the store is slow now."""

LATE_S = 0.25

Told = dict[tuple[int, int], list[dict[str, Any]]]


def told(folder: Path) -> Told:
    """Lines of each rank by (attempt, rank), without a torn last one."""
    found: Told = {}
    for path in folder.glob("truth-*.jsonl"):
        _, attempt, rank = path.stem.split("-")
        whole, _, _ = path.read_text().rpartition("\n")
        found[int(attempt), int(rank)] = [json.loads(line) for line in whole.splitlines()]
    return found


@dataclass
class Witness:
    """Sees from outside when each process is gone.

    Attributes:
        late_s: By how much it may be late, since it was held up itself.
    """

    folder: Path
    gone: dict[tuple[int, int], float] = field(default_factory=dict)
    pids: dict[tuple[int, int], int] = field(default_factory=dict)
    late_s: float = 0.0
    _looked_s: float = 0.0

    def look(self) -> None:
        before_s, self._looked_s = self._looked_s, time.monotonic()
        if before_s and self._looked_s - before_s > LATE_S:
            self.late_s += self._looked_s - before_s
        for path in self.folder.glob("pid-*"):
            _, attempt, rank = path.name.split("-")
            with contextlib.suppress(ValueError):
                self.pids.setdefault((int(attempt), int(rank)), int(path.read_text()))
        for key, pid in self.pids.items():
            if key not in self.gone and not is_running(pid):
                self.gone[key] = time.time()


@dataclass
class Throttle:
    """A store that becomes slow at some step, until the ranks have waited for it that long, and then fast again.

    How long that is depends on how far the daemon had read ahead, so it ends by what was waited, not by the clock.
    """

    proxy: CountingProxy
    folder: Path
    first_step: int
    bytes_per_s: float
    wait_s: float
    begun: float = 0.0
    is_over: bool = False
    _looked: float = 0.0

    def look(self, *, at_once: bool = False) -> None:
        now = time.time()
        if self.is_over or (now < self._looked + 0.25 and not at_once):
            return
        self._looked = now
        lines = [line for own in told(self.folder).values() for line in own if line["what"] == "fetch"]
        if not self.begun and any(line["step"] >= self.first_step for line in lines):
            self.begun = now
            self.proxy.bandwidth_bytes_per_s = self.bytes_per_s
            (self.folder / THROTTLED).touch()
        waited = sum(line["end"] - max(line["begin"], self.begun) for line in lines if line["end"] > self.begun)
        if self.begun and waited >= self.wait_s:
            self.proxy.bandwidth_bytes_per_s = 0
            self.is_over = True


def held_up_s(lines_of: Told) -> float:
    """For how long all processes together were held up: so far apart may two clocks be that they read."""
    return sum(_span(line) for lines in lines_of.values() for line in lines if line["what"] == "held")


def injected(lines_of: Told, gone: dict[tuple[int, int], float]) -> dict[Category, float]:
    """Seconds of all devices by category, without looking at any event."""
    total: dict[Category, float] = defaultdict(float)
    for attempt in sorted({attempt for attempt, _ in lines_of}):
        mine = {rank: lines for (a, rank), lines in lines_of.items() if a == attempt}
        later = [lines[0]["step"] for (a, _), lines in lines_of.items() if a == attempt + 1]
        _count_steps(total, mine, kept_until=later[0] if later else 10**9)
        last_exit = max(gone[attempt, rank] for rank in mine)
        _count_death(total, mine, {rank: gone[attempt, rank] for rank in mine}, last_exit)
        for rank in mine:
            following = lines_of.get((attempt + 1, rank))
            if following:
                first = next(line for line in following if line["what"] == "fetch")
                total[Category.RESTART] += first["begin"] - last_exit
    return total


def _of(lines: list[dict[str, Any]], what: str) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in lines if line["what"] == what}


def _span(line: dict[str, Any]) -> float:
    return float(line["end"] - line["begin"])


def _count_steps(total: dict[Category, float], mine: dict[int, list[dict[str, Any]]], *, kept_until: int) -> None:
    arrivals: dict[int, list[float]] = defaultdict(list)
    for lines in mine.values():
        for step in _of(lines, "step"):
            arrivals[step].append(_of(lines, "collective")[step]["begin"])
    for lines in mine.values():
        fetches, collectives, saves = (_of(lines, what) for what in ("fetch", "collective", "save"))
        total[Category.CKPT] += sum(_span(save) for save in saves.values())
        for step, line in _of(lines, "step").items():
            if step > kept_until:
                total[Category.LOST] += _span(line) - (_span(saves[step]) if step in saves else 0.0)
            else:
                total[Category.FETCH] += _span(fetches[step])
                total[Category.STRAGGLER] += max(arrivals[step]) - collectives[step]["begin"]


def _count_death(
    total: dict[Category, float], mine: dict[int, list[dict[str, Any]]], gone: dict[int, float], last_exit: float
) -> None:
    struck = {rank: line["end"] for rank, lines in mine.items() for line in lines if line["what"].startswith("SIG")}
    if not struck:
        return
    death = min(struck.values())
    reactions = [line["end"] for lines in mine.values() for line in lines if line["what"] == "error"]
    reactions += [left for rank, left in gone.items() if rank not in struck]
    reaction = max(death, min(reactions))
    for lines in mine.values():
        reached = max((line["end"] for line in lines if line["what"] in ("step", "save", "restored")), default=death)
        last_step = max((line["end"] for line in lines if line["what"] == "step"), default=reached)
        saved = sum(_span(line) for line in lines if line["what"] == "save" and line["end"] > last_step)
        total[Category.LOST] += max(0.0, death - last_step - saved)
        total[Category.DETECT] += max(0.0, reaction - max(death, reached))
        total[Category.SPIN] += last_exit - max(reaction, reached)
