"""Waiting times of the training loop, on their way to the metrics of the node."""

from __future__ import annotations

import _thread
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from cacheloader.config import NO_DAEMON
from cacheloader.errors import CacheloaderError
from cacheloader.protocol import messages
from cacheloader.transport.control import connect_running
from cacheloader.transport.inheritance import close_after_fork

if TYPE_CHECKING:
    from pathlib import Path

    from cacheloader.config import TransportOptions
    from cacheloader.transport.link import Link

_SECONDS_PER_REPORT = 4096  # nine bytes each: well below the limit of a message


class FetchReporter:
    """Tells the daemon how long the training loop waited for its batches, for the metrics of the node.

    A report is worth little and the training loop's time much: it goes out at most once a second, by a thread of its
    own, since to send wakes another process and may take milliseconds, and is dropped where no daemon takes it. The
    thread ends with the report, so that none is there when a loader forks its workers.

    Args:
        options: Which daemon.
    """

    PERIOD_S = 1.0
    PATIENCE_S = 0.05
    RETRY_S = 30.0

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._seconds: list[float] = []
        self._samples = 0
        self._due_s = float("inf") if options.daemon == NO_DAEMON else 0.0
        self._link: Link | None = None  # until a report is sent, its thread's
        self._sent = threading.Event()
        self._sent.set()

    def add(self, fetch_seconds: float, num_samples: int) -> None:
        """Take one batch's waiting time into the next report."""
        if self._due_s == float("inf"):
            return
        self._seconds.append(fetch_seconds)
        self._samples += num_samples
        now_s = time.monotonic()
        if now_s >= self._due_s and self._sent.is_set():
            self._due_s = now_s + self.PERIOD_S
            self._hand_over()

    def watch(self, path: Path, *, run: str, attempt: str, rank: int, world: int) -> RunWatch:
        """Ask the same daemon to watch this rank of a run, and to write what it sees to ``path``."""
        return RunWatch(self._options, path, messages.WatchRun(run=run, attempt=attempt, rank=rank, world=world))

    def flush(self) -> None:
        """Send what is left, at the end of an epoch."""
        if self._seconds and self._due_s < float("inf") and self._sent.wait(2 * self.PATIENCE_S):
            self._hand_over()
        self._sent.wait(2 * self.PATIENCE_S)

    def close(self) -> None:
        """Close the connection; calling it again does nothing."""
        self.flush()
        self._hang_up()

    def close_in_child(self) -> None:
        """A thread that sends is the parent's, and so is the connection, which closes itself."""
        self._sent = threading.Event()
        self._sent.set()

    def _hand_over(self) -> None:
        seconds, self._seconds = self._seconds, []
        samples, self._samples = self._samples, 0
        self._sent = threading.Event()
        close_after_fork(self)
        try:
            # threading.Thread would wait for the thread to run, which is what this is to avoid.
            _thread.start_new_thread(self._send, (seconds, samples, self._sent))
        except RuntimeError:  # no more threads, or the interpreter is about to end
            self._sent.set()

    def _send(self, seconds: list[float], samples: int, sent: threading.Event) -> None:
        deadline = time.monotonic() + self.PATIENCE_S
        try:
            if self._link is None or not self._link.is_open:
                self._link = connect_running(self._options, deadline)
                self._link.hello(deadline=deadline)
            for start in range(0, len(seconds), _SECONDS_PER_REPORT):
                part = seconds[start : start + _SECONDS_PER_REPORT]
                self._link.send(messages.Report(fetch_seconds=part, samples=samples), deadline=deadline)
                samples = 0
        except (CacheloaderError, TimeoutError):
            self._hang_up()
            self._due_s = deadline + self.RETRY_S
        finally:
            sent.set()

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


class RunWatch:
    """Tells the daemon what a rank of a training run does, so that it leaves an account if it is killed or hangs.

    At most once a second, waits for nothing, and is silent where no daemon takes it.

    Args:
        options: Which daemon.
        path: The file that the daemon shall write to.
        request: Who is to be watched.
    """

    PERIOD_S = 1.0
    PATIENCE_S = 0.05
    RETRY_S = 30.0

    def __init__(self, options: TransportOptions, path: Path, request: messages.WatchRun) -> None:
        self._options = options
        self._path = path
        self._request = request
        self._link: Link | None = None
        self._due_s = float("inf") if options.daemon == NO_DAEMON else 0.0
        self._beat = messages.Beat(step=0)

    def beat(self, step: int, *, dur_s: float, exposed_s: float, tokens: int, kept_tokens: int, committed: int) -> None:
        """A step is complete; its numbers go with the next message."""
        if self._due_s == float("inf"):
            return
        before = self._beat
        self._beat = messages.Beat(
            step=step,
            steps=before.steps + 1,
            step_seconds=before.step_seconds + dur_s,
            exposed_seconds=before.exposed_seconds + exposed_s,
            tokens=before.tokens + tokens,
            kept_tokens=before.kept_tokens + kept_tokens,
            committed_step=committed,
        )
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + self.PERIOD_S
            self._send(now_s + self.PATIENCE_S)

    def end(self) -> None:
        """The rank ends by itself."""
        if self._due_s < float("inf"):
            self._send(time.monotonic() + self.PATIENCE_S)
        if self._link is not None:
            with suppress(CacheloaderError, TimeoutError):
                self._link.send(messages.EndRun(), deadline=time.monotonic() + self.PATIENCE_S)
            self._link.close()
        self._link, self._due_s = None, float("inf")

    def _send(self, deadline: float) -> None:
        try:
            if self._link is None or not self._link.is_open:
                self._link = connect_running(self._options, deadline)
                if self._link.hello(deadline=deadline).version < messages.SIGNS_OF_LIFE:
                    self._link.close()
                    self._due_s = float("inf")  # an older daemon watches nobody
                    return
                fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                try:
                    self._link.send(self._request, fd, deadline=deadline)
                finally:
                    os.close(fd)
            self._link.send(self._beat, deadline=deadline)
            self._beat = messages.Beat(step=self._beat.step)
        except (CacheloaderError, TimeoutError, OSError):
            if self._link is not None:
                self._link.close()
            self._link, self._due_s = None, deadline + self.RETRY_S
