"""Runs contestants in turn, each time in a fresh process with an empty directory of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import free_memory
from benchmarks.harness.child import FAILURE
from benchmarks.harness.measurement import NOISY_CORES, Failure, Measurement, Round
from benchmarks.harness.processes import Snapshot, machine_cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.harness.contestant import Task

ROOT = Path(__file__).resolve().parents[2]

CALM_BUSY_CORES = 0.3
_CALM_LOOK_S = 0.5
MAX_FAILURES = 2
"""A contestant that failed so often is not tried again: one that hangs would take the time of all others."""

COMPILED_VARIABLE, NOT_COMPILED_VARIABLE = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"
"""Where python keeps compiled modules, and that it does not."""

_LOG_TAIL_BYTES = 4000
_MESSAGE_LENGTH = 300
_COMPILED = "compiled"
_LEAVE_S = 5.0
_PAUSE_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36
# What would change a library's configuration behind the report's back.
_FOREIGN_VARIABLES = ("AWS_", "CACHELOADER_", "WDS_", "GOPEN_", "S3_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One contestant of a scenario.

    Attributes:
        label: Its name in tables.
        factory: ``"module:callable"`` that makes it in the child process.
        options: Keyword arguments of the factory.
        task: What it shall deliver; ``folder`` is set for each run.
        python: Interpreter of the environment that it needs.
        is_peer: Whether it is somebody else's: its failure is a line in the report and no fault of the benchmark.
    """

    label: str
    factory: str
    task: Task
    options: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    is_peer: bool = False


class Runner:
    """Runs entries and collects what they measured.

    Args:
        folder: Empty directory on the disk under test; each run gets one below it.
        before_each: Called before each run, to bring the store to the same state.
        timeout_s: Longest time for one run.
        calm_timeout_s: How long to wait before each run until the rest of the machine is calm.
        noisy_retries: How often to repeat a run during which others used more than ``NOISY_CORES``; the last counts.
        memory_bytes: How much memory the host shall have ready before each run (see ``free_memory``); 0: whatever it
            has, which takes no time.
        say: Where progress goes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        before_each: Callable[[], None] = lambda: None,
        timeout_s: float = 300.0,
        calm_timeout_s: float = 20.0,
        noisy_retries: int = 0,
        memory_bytes: int = free_memory.SIZE_BYTES,
        say: Callable[[str], None] = print,
    ) -> None:
        self._folder = folder
        self._before_each = before_each
        self._timeout_s = timeout_s
        self._calm_timeout_s = calm_timeout_s
        self._noisy_retries = noisy_retries
        self._memory_bytes = memory_bytes
        self._say = say
        # Orphans of a run become children of this process, which can then end them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def rounds(self, entries: Sequence[Entry], *, repeats: int, budget_s: float = math.inf) -> Iterator[Round]:
        """All entries in turn, then all again, each round in another order, which is the same in every call.

        So none has the same one before it all the time, whose memory and files are still being cleared away. What
        fails does not keep the others from running.

        Args:
            entries: Contestants.
            repeats: Rounds.
            budget_s: No round is begun that would not end by then if it took as long as the one before it; the first
                always is.

        Yields:
            For each round, what was measured and what failed.
        """
        begin, last_s = time.monotonic(), 0.0
        failures = dict.fromkeys((entry.label for entry in entries), 0)
        try:
            for number in range(repeats):
                round_begin = time.monotonic()
                if number and round_begin - begin + last_s > budget_s:
                    return
                left = [entry for entry in entries if failures[entry.label] < MAX_FAILURES]
                if number:
                    random.Random(number).shuffle(left)
                done = self._round(left, number, f"[{number + 1}/{repeats}]")
                for label in done.failed:
                    failures[label] += 1
                last_s = time.monotonic() - round_begin
                yield done
        finally:
            shutil.rmtree(self._folder / _COMPILED, ignore_errors=True)

    def _round(self, entries: Sequence[Entry], number: int, mark: str) -> Round:
        done = Round(measured={}, failed={})
        for place, entry in enumerate(entries):
            begin = time.monotonic()
            for noisy in range(self._noisy_retries + 1):
                run = self._run_one(entry, self._folder / f"round-{number}-run-{place}")
                if isinstance(run, Failure):
                    break
                done.measured[entry.label] = replace(run, noisy_before=noisy)
                if run.other_cores <= NOISY_CORES:
                    break
            took = f"{time.monotonic() - begin:.0f} s"
            if isinstance(run, Failure):
                done.measured.pop(entry.label, None)
                done.failed[entry.label] = run
                self._say(f"{mark} {entry.label}: failed after {took}: {run}")
            else:
                self._say(f"{mark} {_line(entry.label, done.measured[entry.label])}, {took}")
        return done

    def _run_one(self, entry: Entry, home: Path) -> Measurement | Failure:
        home.mkdir(parents=True)
        own = home / "data"
        own.mkdir()
        try:
            self._before_each()
            busy_cores = wait_until_calm(timeout_s=self._calm_timeout_s)
            order = {
                "factory": entry.factory,
                "options": entry.options,
                "task": replace(entry.task, folder=str(own)).to_dict(),
                "memory_bytes": self._memory_bytes,
            }
            (home / "task.json").write_text(json.dumps(order))
            failure = self._spawn(entry, home)
            if failure is not None:
                return failure
            run = Measurement.from_dict(json.loads((home / "result.json").read_text()))
            return replace(run, busy_cores_before=busy_cores)
        finally:
            shutil.rmtree(home, ignore_errors=True)
            os.sync()  # so that the next run does not wait for this one's pages to reach the disk

    def _spawn(self, entry: Entry, home: Path) -> Failure | None:
        strangers = _children()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_VARIABLES)}
        # The code under test is that beside the benchmarks, whatever else is installed.
        code = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
        environment |= {"PYTHONPATH": code, "HOME": str(home), "TMPDIR": str(home)}
        # As installed, where modules lie there compiled: else each start of a daemon would compile its own.
        environment.setdefault(COMPILED_VARIABLE, str(self._folder / _COMPILED))
        environment.pop(NOT_COMPILED_VARIABLE, None)
        process: subprocess.Popen[bytes] | None = None
        status: int | None = None
        with (home / "log").open("wb") as log:
            try:
                # A signal may end this while the process is being started: it is a child by then, and known as such.
                process = subprocess.Popen(
                    [
                        entry.python,
                        "-m",
                        "benchmarks.harness.child",
                        str(home / "task.json"),
                        str(home / "result.json"),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=ROOT,
                    env=environment,
                    start_new_session=True,
                )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(self._timeout_s)
            finally:
                if process is not None and process.poll() is None:
                    process.kill()
                    process.wait()
                end_children(spared=strangers)
        if status == 0:
            return None
        tail = (home / "log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        self._say(f"output of {entry.label} ends with:\n{tail}")
        return _failure(status, home, tail, timeout_s=self._timeout_s)


def _failure(status: int | None, home: Path, tail: str, *, timeout_s: float) -> Failure:
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if status is None:
        found = Failure(kind="hung", message=f"had not ended after {timeout_s:.0f} s")
    elif (result := home / "result.json").exists() and (told := json.loads(result.read_text()).get(FAILURE)):
        found = Failure(**told)
    else:
        found = Failure(kind=f"ended with status {status}", message=last)
    # Where this machine keeps its files is nobody's business.
    message = re.sub(r"(/[\w.+-]+){2,}", lambda path: path[0].rpartition("/")[2], found.message)
    return replace(found, message=message[:_MESSAGE_LENGTH])


def wait_until_calm(*, timeout_s: float) -> float:
    """Wait until little else runs on this machine, or until the time is up.

    Returns:
        Cores in use at the last look.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        begin, (busy_s, *_) = time.monotonic(), machine_cpu_s()
        time.sleep(_CALM_LOOK_S)
        busy_cores = (machine_cpu_s()[0] - busy_s) / (time.monotonic() - begin)
        if busy_cores <= CALM_BUSY_CORES or time.monotonic() >= deadline:
            return busy_cores


def end_children(*, spared: set[int]) -> None:
    """End every child of this process but ``spared``: first kindly, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _LEAVE_S
        asked: set[int] = set()
        while (left := _children() - spared) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    if pid not in asked:
                        os.kill(pid, number)
                        asked.add(pid)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(_PAUSE_S)
        if not left:
            return


def _children() -> set[int]:
    return {pid for pid, stat in Snapshot.take().stats.items() if stat.parent == os.getpid()}


def _line(label: str, measurement: Measurement) -> str:
    phases = ", ".join(f"{phase.name} {phase.samples_per_s:,.0f}/s" for phase in measurement.phases)
    thrown_away = f", {measurement.noisy_before} noisy runs thrown away" if measurement.noisy_before else ""
    return f"{label}: {phases} (others used up to {measurement.other_cores:.2f} cores{thrown_away})"
