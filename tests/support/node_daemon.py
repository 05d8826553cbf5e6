"""A real daemon in a process of its own, started as a client would start it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support.parent_death import die_with_parent
from tests.support.raw_client import RawClient
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REPOSITORY = Path(__file__).parents[2]


@dataclass
class NodeDaemon:
    """One cache directory and, between ``start`` and ``stop``, the daemon that holds it."""

    directory: Path
    cache_size: str = "200MiB"
    private: bool = True
    arguments: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    launcher: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = field(init=False, default=None)

    def start(self, *, timeout_s: float = 60.0) -> Self:
        """Return once it is ready; fails if it is not."""
        line = self.try_start(timeout_s=timeout_s)
        assert line.get("ready") is True, f"{line}\n{self.log}"
        assert self.process is not None
        assert line["pid"] == self.process.pid
        return self

    def try_start(self, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """What it says of its start, {} if it ended without a word."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        news, ready = os.pipe()
        command = [sys.executable, "-P", "-m", "cacheloader_daemon", "--cache-dir", str(self.directory)]
        command += ["--ready-fd", str(ready)]
        # It leaves when the test says so and not because the machine was busy with something else for a minute.
        command += ["--private", "--idle-timeout", "0"] if self.private else []
        command += ["--cache-size", self.cache_size] if self.cache_size else []
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                die_with_parent([*self.launcher, *command, *self.arguments]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[ready],
                cwd="/",
                env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon", **self.environment},
            )
        os.close(ready)
        try:
            assert select.select([news], [], [], timeout_s)[0], f"no word after {timeout_s} s\n{self.log}"
            with os.fdopen(news, "rb", closefd=False) as file:
                line = file.readline()
        finally:
            os.close(news)
        return json.loads(line) if line else {}

    @property
    def log_path(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.log")

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def socket(self) -> Path:
        return self.directory / "daemon.sock"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def rss_bytes(self) -> int:
        """Memory that is resident."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def children(self) -> list[int]:
        """Processes that it has started and that live."""
        found: set[int] = set()
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
                found.update(map(int, (task / "children").read_text().split()))
        return sorted(found)

    @property
    def blobs(self) -> list[Path]:
        """Data files of whole shards."""
        return sorted(self.directory.glob("blobs/*/*.data"))

    @property
    def partial_files(self) -> list[Path]:
        """Files of shards on their way."""
        return sorted(self.directory.glob("blobs/*/.*.new"))

    def connect(self, *, greet: bool = True) -> RawClient:
        return RawClient(self.socket, greet=greet)

    def status(self) -> dict[str, Any]:
        with self.connect() as client:
            return json.loads(client.status())

    def plan(self) -> dict[str, int]:
        """The planner's statistics."""
        return self.status()["plan"]

    def exit_code(self, *, timeout_s: float = 60.0) -> int:
        """Wait for its end."""
        assert self.process is not None
        code = self.process.wait(timeout_s)
        self.process = None
        return code

    def stop(self, *, timeout_s: float = 60.0) -> int | None:
        """SIGTERM, and its exit code; ``None`` if it did not run."""
        if self.process is None:
            return None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.exit_code(timeout_s=timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, as a crash would end it; its workers end by themselves."""
        if self.process is not None:
            workers = self.children if self.process.poll() is None else []  # or a test has taken note of its end
            self.process.kill()
            self.process.wait(60)
            self.process = None
            wait_until(lambda: not any(is_running(pid) for pid in workers))


@contextlib.contextmanager
def held_still(pid: int) -> Iterator[None]:
    """A process does nothing while the block runs: what it is sent waits for it, and its files stay as they are."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: all(state in "TtZX" for state in _thread_states(pid)), timeout_s=60)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _thread_states(pid: int) -> list[str]:
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
