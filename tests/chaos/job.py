"""The job under test: attempts that follow one another, each started where the last checkpoint says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.chaos.processes import MARK
from tests.support.node_daemon import REPOSITORY
from tests.support.parent_death import die_with_parent

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Job:
    """One job and the attempt that runs.

    Attributes:
        folder: Its logs, checkpoint and cache.
        mark: What its processes carry in their environment.
        config: What every attempt is told.
    """

    folder: Path
    mark: str
    config: dict[str, Any]
    attempt: int = -1
    launcher: subprocess.Popen[bytes] | None = field(default=None)

    def launch(self, *, world: int, num_workers: int) -> None:
        """Start the next attempt."""
        self.attempt += 1
        path = self.folder / f"config-{self.attempt:04d}.json"
        more = {
            "attempt": self.attempt,
            "world": world,
            "num_workers": num_workers,
            "rendezvous": str(self.folder / f"rendezvous-{self.attempt:04d}"),
        }
        path.write_text(json.dumps(self.config | more))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon",
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
        }
        with self.output_path.open("wb") as output:
            self.launcher = subprocess.Popen(
                die_with_parent([sys.executable, "-m", "tests.chaos.launcher", str(path)]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )

    @property
    def output_path(self) -> Path:
        """What the attempt's processes print."""
        return self.folder / f"output-{self.attempt:04d}.txt"

    @property
    def ended(self) -> int | None:
        """The attempt's exit code, ``None`` while it runs."""
        assert self.launcher is not None
        return self.launcher.poll()

    @property
    def num_steps(self) -> int:
        """Steps of rank 0 in this attempt."""
        path = self.folder / f"got-{self.attempt:04d}-0.jsonl"
        return path.read_bytes().count(b'"until"') if path.exists() else 0

    def wish_to_stop(self) -> None:
        """Let the job end with the epoch under way."""
        (self.folder / "stop").touch()
