"""Ranks of training runs that asked to be watched: heartbeats, and the end of those that cannot tell it themselves.

A rank hands over an open file of its own folder, so that the daemon writes with the rank's rights and not with its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import platform
import select
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cacheloader.errors import ProtocolError
from cacheloader_daemon.exposition import MetricsText, by

if TYPE_CHECKING:
    from cacheloader.protocol.messages import Beat, WatchRun

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
EVENT_FORMAT = 1
GRACE_S = 1.0
"""After the end of a connection, how long its process may take to be gone."""

MAX_NAME = 200


@dataclass(slots=True)
class TrainingCounters:
    """What watched ranks have done since the daemon's start; each number only rises.

    Attributes:
        steps: Steps, of every rank.
        step_seconds: Their duration.
        exposed_seconds: Time that devices waited for data in them.
        tokens_issued: Their tokens.
        tokens_kept: Tokens that a commit has made safe; what a rollback takes back later is not taken off here.
        committed_step: The last step that is safe; of the run that said so last.
        committed_at: When that was said, since 1970.
        vanished: Ranks whose process ended without a word.
    """

    steps: int = 0
    step_seconds: float = 0.0
    exposed_seconds: float = 0.0
    tokens_issued: int = 0
    tokens_kept: int = 0
    committed_step: int = 0
    committed_at: float = 0.0
    vanished: int = 0


class Watching:
    """All watched ranks of the node."""

    def __init__(self) -> None:
        self.counters = TrainingCounters()
        self._ranks: set[WatchedRank] = set()
        self._is_leaving = False
        self._last_seq = 0

    def watch(self, request: WatchRun, fd: int, *, pid: int) -> WatchedRank:
        """Begin to watch; owns ``fd`` from now on.

        Raises:
            ProtocolError: The descriptor is no regular file opened for appending, or a name is none.
        """
        why = _refusal(request, fd)
        if why:
            os.close(fd)
            raise ProtocolError(why)
        rank = WatchedRank(self, request, fd, pid=pid)
        self._ranks.add(rank)
        return rank

    @property
    def num_ranks(self) -> int:
        """Ranks that are watched now."""
        return len(self._ranks)

    @property
    def oldest_beat_s(self) -> float:
        """Time since the most silent of them said something, 0 of none."""
        now_s = time.monotonic()
        return max((now_s - rank.beat_s for rank in self._ranks), default=0.0)

    @property
    def is_leaving(self) -> bool:
        """Whether it is the daemon that ends connections now."""
        return self._is_leaving

    def leave(self) -> None:
        """The daemon leaves: what ends from here on is no rank's doing."""
        self._is_leaving = True

    def is_watched(self, name: tuple[str, str, int]) -> bool:
        """Whether this (run, attempt, rank) is watched, over another connection perhaps."""
        return any(rank.name == name for rank in self._ranks)

    def next_seq(self) -> int:
        """A number for an event, above all earlier ones, those before a restart of the daemon included."""
        self._last_seq = max(self._last_seq + 1, time.time_ns())
        return self._last_seq

    def metrics(self) -> str:
        """Families of the Prometheus exposition; none of them names a rank."""
        counters, text = self.counters, MetricsText()
        text.gauge("training_watched_ranks", "Ranks of training runs that are watched.", self.num_ranks)
        text.gauge("training_oldest_beat_seconds", "Since the most silent of them did something.", self.oldest_beat_s)
        text.counter("training_steps_total", "Steps, of every rank.", counters.steps)
        text.counter("training_step_seconds_total", "Duration of these steps.", counters.step_seconds)
        text.counter(
            "cacheloader_exposed_stall_seconds_total",
            "Time that devices had nothing to do, since the loop waited for data.",
            counters.exposed_seconds,
        )
        text.counter(
            "training_tokens_total",
            "Tokens; kept counts promotions by commits, what a rollback takes back is not taken off.",
            by("state", {"issued": counters.tokens_issued, "kept": counters.tokens_kept}),
        )
        text.gauge("training_last_commit_step", "The last step that is safe.", counters.committed_step)
        text.gauge("training_last_commit_timestamp_seconds", "When that became known.", counters.committed_at)
        text.counter("training_vanished_ranks_total", "Ranks that ended without a word.", counters.vanished)
        return text.text()

    def forget(self, rank: WatchedRank) -> None:
        """``rank`` is watched no longer."""
        self._ranks.discard(rank)


class WatchedRank:
    """One process, from its ``WatchRun`` to the end of its connection."""

    def __init__(self, watching: Watching, request: WatchRun, fd: int, *, pid: int) -> None:
        self._watching = watching
        self._rank = request.rank
        self.name = (request.run, request.attempt, request.rank)
        try:
            self._process = os.pidfd_open(pid)
        except OSError:  # another container's
            self._process = -1
        self._fd = fd
        self._pid = pid
        self._step = -1
        self._loop = asyncio.get_running_loop()
        self._writing: asyncio.Future[None] | None = None
        self._has_ended = False
        self.beat_s = time.monotonic()
        self._common: dict[str, object] = {
            "v": EVENT_FORMAT,
            "run": request.run,
            "att": request.attempt,
            "node": platform.node(),
            "rank": -1,
            "world": request.world,
        }
        self._timer = self._loop.call_later(HEARTBEAT_S, self._heartbeat)

    def beat(self, beat: Beat) -> None:
        """The rank lives, and has done something."""
        self.beat_s = time.monotonic()
        self._step = beat.step
        counters = self._watching.counters
        numbers = (beat.steps, beat.step_seconds, beat.exposed_seconds, beat.tokens, beat.kept_tokens)
        if not all(0 <= number < float("inf") for number in numbers):
            return
        counters.steps += beat.steps
        counters.step_seconds += beat.step_seconds
        counters.exposed_seconds += beat.exposed_seconds
        counters.tokens_issued += beat.tokens
        counters.tokens_kept += beat.kept_tokens
        if beat.committed_step >= 0:
            counters.committed_step = beat.committed_step
            counters.committed_at = time.time()

    def end(self) -> None:
        """It ends by itself and has said why."""
        self._has_ended = True

    def close(self) -> None:
        """Its connection is gone: if its process is, too, and said nothing, that is written down."""
        self._timer.cancel()
        self._watching.forget(self)
        if self._has_ended or self._watching.is_leaving:
            self._finish(b"")
        else:
            # A process closes its descriptors some time before it is gone, and a client may connect again.
            died = (time.time_ns(), time.monotonic() - self.beat_s)
            self._timer = self._loop.call_later(GRACE_S, self._decide, *died)

    def _decide(self, died_wall_ns: int, age_s: float) -> None:
        if self._watching.is_watched(self.name) or not self._is_gone():
            self._finish(b"")
            return
        self._watching.counters.vanished += 1
        fields: dict[str, object] = {
            "kind": "exit",
            "of_rank": self._rank,
            "first_seen_by": "daemon",
            "died_wall_ns": died_wall_ns,
            "step": self._step,
            "evidence": f"process {self._pid} left without a word, {age_s:.1f} s after its last sign of life",
        }
        self._finish(self._line("fail", fields))

    def _is_gone(self) -> bool:
        if self._process < 0:
            return True
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def _finish(self, line: bytes) -> None:
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

        def write(_: object = None) -> None:
            self._loop.run_in_executor(None, _write_and_close, self._fd, line)

        if self._writing is not None and not self._writing.done():
            self._writing.add_done_callback(write)  # the descriptor is in use
        else:
            write()

    def _heartbeat(self) -> None:
        self._timer = self._loop.call_later(HEARTBEAT_S, self._heartbeat)
        if self._writing is not None and not self._writing.done():
            return  # its file system hangs; one write waits and no more
        state, cpu_s = _process(self._pid)
        line = self._line(
            "hb",
            {
                "of_rank": self._rank,
                "step": self._step,
                "beat_age_s": round(time.monotonic() - self.beat_s, 3),
                "state": state,
                "cpu_s": cpu_s,
            },
        )
        self._writing = self._loop.run_in_executor(None, _write, self._fd, line)

    def _line(self, event: str, fields: dict[str, object]) -> bytes:
        now = {
            "ev": event,
            "seq": self._watching.next_seq(),
            "wall_ns": time.time_ns(),
            "mono_ns": time.monotonic_ns(),
        }
        return json.dumps(now | self._common | fields, separators=(",", ":")).encode() + b"\n"


def _refusal(request: WatchRun, fd: int) -> str:
    """Why a rank cannot be watched, "" if it can."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    if not is_file or not flags & os.O_APPEND or flags & os.O_ACCMODE == os.O_RDONLY:
        return "a watched run's file has to be a regular one, open for appending"
    if not 0 < len(request.run) <= MAX_NAME or not 0 < len(request.attempt) <= MAX_NAME or request.rank < 0:
        return f"run, attempt and rank of a watched run: names of 1 to {MAX_NAME} characters, a number from 0 on"
    return ""


def _write(fd: int, line: bytes) -> None:
    with suppress(OSError):  # a full disk of the run's folder costs its heartbeats, nothing else
        os.write(fd, line)


def _write_and_close(fd: int, line: bytes) -> None:
    if line:
        _write(fd, line)
    os.close(fd)


def _process(pid: int) -> tuple[str, float]:
    """State and processor time of a process; "" where it cannot be seen (another container)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return "", 0.0
