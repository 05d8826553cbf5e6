"""Writes the events of one rank. What it costs a training step is one formatted line and one write call.

A full disk costs events, never the job. Events that come before a run is open (a restore, most often) are kept and
written, with their own time, when it is.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cacheloader.errors import ConfigError
from cacheloader.goodput.events import FORMAT_VERSION
from cacheloader.lines import LineFile, heading, json_line, num_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cacheloader.goodput.run import Run

SEGMENT_BYTES = 64 * 2**20
"""A file that has grown beyond this is sealed and never written again, so that it can be copied to an object store."""

_MAX_EARLY = 256

_log = logging.getLogger(__name__)
_early: deque[tuple[int, int, str, dict[str, Any]]] = deque(maxlen=_MAX_EARLY)
_active: list[Run] = []


class Recorder:
    """The event file of one rank in one attempt.

    Safe in several threads. Not in a child after fork: there it drops everything.

    Args:
        folder: The run's folder; made if need be.
        attempt: Name of the launch, the same on all ranks.
        rank: This process.
        world_size: Ranks of the attempt.
        segment_bytes: Size at which a file is sealed and the next begun.
        sealed: Called with the name of each file that has been sealed; must not wait.

    Raises:
        ConfigError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        attempt: str,
        rank: int,
        world_size: int,
        segment_bytes: int = SEGMENT_BYTES,
        sealed: Callable[[str], None] | None = None,
    ) -> None:
        self._folder = folder
        self._stem = stem(attempt, rank)
        self._segment_bytes = segment_bytes
        self._sealed = sealed
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._has_failed = False
        self._file: LineFile | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # In the order in which they were written: the first segment has no number.
            written = sorted(folder.glob(f"{self._stem}*.jsonl"), key=lambda path: path.name.removesuffix(".jsonl"))
            self._segment = max(0, len(written) - 1)
            self._seq = sum(num_lines(path) for path in written)
            self._file = LineFile(self.path)
        except OSError as error:
            raise ConfigError(
                f"the goodput folder {str(folder)!r} cannot be written: {error.strerror}; pass a folder that every "
                "rank can write"
            ) from error
        self.run = folder.resolve().name
        self.attempt, self.rank, self.world_size = attempt, rank, world_size
        self._heading = heading(version=FORMAT_VERSION, run=self.run, attempt=attempt, rank=rank, world_size=world_size)

    @property
    def watch_path(self) -> Path:
        """The file that the node's daemon writes what it sees of this rank to."""
        return self._folder / f"{stem(self.attempt, -1)}-r{self.rank:05d}.jsonl"

    @property
    def path(self) -> Path:
        """The file that is being written."""
        return self._folder / _segment_name(self._stem, self._segment)

    def emit(self, event: str, *, step: int | None = None, at: tuple[int, int] | None = None, **fields: Any) -> None:
        """Write one event of any kind; ``fields`` are those of ``events``.

        Args:
            event: Its ``ev``.
            step: Training step that it is about.
            at: (wall, monotonic) time in nanoseconds, if it is not now.
            fields: Everything else.
        """
        if step is not None:
            fields["step"] = step
        text = json.dumps(fields, separators=(",", ":"))[1:-1]
        self.write(event, f",{text}" if text else "", at)

    def write(self, event: str, fields: str, at: tuple[int, int] | None = None) -> None:
        """Write one event whose fields are JSON already, with a comma in front."""
        now = at or (time.time_ns(), time.monotonic_ns())  # before others are waited for
        with self._lock:
            if self._file is None or self._pid != os.getpid():
                return
            seq, self._seq = self._seq, self._seq + 1
            try:
                self._file.append(json_line(event, seq, self._heading, fields, now))
                if self._file.size_bytes >= self._segment_bytes:
                    self._rotate(self._file)
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    _log.warning("the goodput events in %s have a hole from here on: %s", self.path, error)

    def sync(self) -> None:
        """Make what was written durable; milliseconds, so for commits only."""
        with self._lock, suppress(OSError):
            if self._file is not None:
                self._file.sync()

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _rotate(self, full: LineFile) -> None:
        full.sync()
        self._file = None
        full.close()
        if self._sealed is not None:
            self._sealed(self.path.name)
        self._segment += 1
        self._file = LineFile(self.path)


def active() -> Run | None:
    """The run that this process is in, or ``None``."""
    return _active[-1] if _active else None


def emit(event: str, *, step: int | None = None, **fields: Any) -> None:
    """Write an event to the run that this process is in; kept for the next one if it is in none yet."""
    if _active:
        _active[-1].recorder.emit(event, step=step, **fields)
    else:
        _early.append((time.time_ns(), time.monotonic_ns(), event, {**fields, "step": -1 if step is None else step}))


def ckpt_begin(ckpt: str, step: int) -> None:
    """The training thread begins to save ``step`` as ``ckpt``; what follows is no step until ``ckpt_staged``."""
    run = active()
    if run is not None:
        run.is_saving = True
    emit("ckpt.begin", step=step, ckpt=ckpt)


def ckpt_staged(ckpt: str, step: int, *, stall_s: float, size_bytes: int = 0) -> None:
    """The training thread goes on, after a stall that began ``stall_s`` ago."""
    run = active()
    if run is not None:
        run.is_saving = False
    emit("ckpt.staged", step=step, ckpt=ckpt, stall_s=stall_s, bytes=size_bytes)


def ckpt_commit(ckpt: str, step: int, *, size_bytes: int = 0, manifest_hash: str = "") -> None:
    """The checkpoint was *seen* to be durable; the line is made durable too."""
    emit("ckpt.commit", step=step, ckpt=ckpt, bytes=size_bytes, hash=manifest_hash)
    run = active()
    if run is not None:
        run.committed(step)
        run.recorder.sync()


def ckpt_fail(ckpt: str, step: int, *, error: str) -> None:
    """A save came to nothing."""
    run = active()
    if run is not None:
        run.is_saving = False
    emit("ckpt.fail", step=step, ckpt=ckpt, error=error)


def ckpt_delete(ckpt: str, step: int = -1) -> None:
    """A checkpoint was removed on purpose."""
    emit("ckpt.delete", step=step, ckpt=ckpt)


def restore(ckpt: str, step: int, *, skipped: Sequence[tuple[str, str]] = (), world_old: int = 0) -> None:
    """Training goes on behind ``step`` (0: from the start), for the reasons in ``skipped`` not from a newer one."""
    emit("restore", step=step, ckpt=ckpt, skipped=[list(pair) for pair in skipped], world_old=world_old)
    run = active()
    if run is not None:
        run.resume_behind(step)


def enter(run: Run) -> int | None:
    """Make ``run`` the active one and give it what came early.

    Returns:
        The step of an early restore, ``None`` if there was none.
    """
    restored = None
    while _early:
        wall_ns, mono_ns, event, fields = _early.popleft()
        if event in ("restore", "rollback"):
            restored = int(fields["step"] if event == "restore" else fields["to_step"])
        run.recorder.emit(event, at=(wall_ns, mono_ns), **fields)
    _active.append(run)
    return restored


def leave(run: Run) -> None:
    """``run`` is no longer the active one."""
    with suppress(ValueError):
        _active.remove(run)


def stem(attempt: str, rank: int) -> str:
    """How the names of a rank's files begin, on this node; -1 is the daemon."""
    node = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:64]
    return f"events-{attempt}-{node}-{'daemon' if rank < 0 else f'r{rank:05d}'}"


def _segment_name(stem_: str, segment: int) -> str:
    return f"{stem_}.jsonl" if segment == 0 else f"{stem_}.{segment:04d}.jsonl"
