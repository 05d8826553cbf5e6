"""Talking to a running daemon beside reading from it: statistics, reports, the end of a private one. Starts none."""

from __future__ import annotations

import json
import os
import select
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cacheloader.config import TransportOptions
from cacheloader.errors import CacheloaderError, DaemonUnavailable, DeadlineExceeded, ProtocolError
from cacheloader.protocol import messages
from cacheloader.transport.embedded import SOCKET_NAME
from cacheloader.transport.endpoint import connect
from cacheloader.transport.link import Link

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT_S = 10.0
_SECONDS_PER_REPORT = 4096  # nine bytes each: well below the limit of a message


def read_status(options: TransportOptions, *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The running daemon's statistics, as it reports them.

    Args:
        options: Which daemon; of a private one only ``cache_dir`` counts.
        timeout_s: Longest wait.

    Raises:
        DaemonUnavailable: None is running there.
    """
    deadline = time.monotonic() + timeout_s
    with _running(options, deadline) as (link, _):
        request = messages.GetStatus(id=link.next_id())
        link.send(request, deadline=deadline)
        answer = link.receive(request.id, deadline=deadline)
        if not isinstance(answer.reply, messages.Status):
            answer.close()
            raise ProtocolError(f"{link.peer} answered GetStatus with {type(answer.reply).__name__}")
        with os.fdopen(answer.take_fd(), "rb") as file:
            file.seek(0)
            status: dict[str, Any] = json.load(file)
            return status


def stop_daemon(cache_dir: Path, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Ask the private daemon of ``cache_dir`` to leave and wait until its process is gone.

    Returns:
        Whether one was running.

    Raises:
        DeadlineExceeded: It is still there after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with _running(TransportOptions(daemon="embedded", cache_dir=cache_dir), deadline) as (link, welcome):
            process = os.pidfd_open(welcome.pid)
            try:
                request = messages.Stop(id=link.next_id())
                link.send(request, deadline=deadline)
                answer = link.receive(request.id, deadline=deadline)
                answer.close()
                _wait_for_end(process, deadline, f"{link.peer} (pid {welcome.pid})")
            finally:
                os.close(process)
    except (DaemonUnavailable, ProcessLookupError):
        return False
    return True


class FetchReporter:
    """Tells the daemon how long the training loop waited for its batches, for the metrics of the node.

    A report is worth little and the training loop's time much: it goes out at most once a second, waits for nothing,
    and is dropped where no daemon takes it.

    Args:
        options: Which daemon.
    """

    PERIOD_S = 1.0
    PATIENCE_S = 0.05
    RETRY_S = 30.0

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._link: Link | None = None
        self._seconds: list[float] = []
        self._samples = 0
        self._due_s = 0.0

    def add(self, fetch_seconds: float, num_samples: int) -> None:
        """Take one batch's waiting time into the next report."""
        self._seconds.append(fetch_seconds)
        self._samples += num_samples
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + self.PERIOD_S
            self._send(now_s + self.PATIENCE_S)

    def flush(self) -> None:
        """Send what is left, at the end of an epoch."""
        if self._seconds:
            self._send(time.monotonic() + self.PATIENCE_S)

    def close(self) -> None:
        """Close the connection; calling it again does nothing."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _send(self, deadline: float) -> None:
        seconds, self._seconds = self._seconds, []
        samples, self._samples = self._samples, 0
        try:
            if self._link is None or not self._link.is_open:
                self._link = _connect(self._options, deadline)
                self._link.hello(deadline=deadline)
            for start in range(0, len(seconds), _SECONDS_PER_REPORT):
                part = seconds[start : start + _SECONDS_PER_REPORT]
                self._link.send(messages.Report(fetch_seconds=part, samples=samples), deadline=deadline)
                samples = 0
        except (CacheloaderError, TimeoutError):
            self.close()
            self._due_s = deadline + self.RETRY_S


def _connect(options: TransportOptions, deadline: float) -> Link:
    path = options.socket_path or options.directory / SOCKET_NAME
    try:
        sock = connect(path, deadline=deadline)
    except OSError as error:
        raise DaemonUnavailable(f"no daemon listens at {path} ({error.strerror or error})") from error
    return Link(sock, peer=f"the daemon at {path}")


@contextmanager
def _running(options: TransportOptions, deadline: float) -> Iterator[tuple[Link, messages.Welcome]]:
    link = _connect(options, deadline)
    try:
        yield link, link.hello(deadline=deadline)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{link.peer} did not answer within its deadline") from error
    finally:
        link.close()


def _wait_for_end(process: int, deadline: float, name: str) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise DeadlineExceeded(f"{name} was asked to stop and still runs; end it with kill")
