"""Waiting times of the training loop, on their way to the metrics of the node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cacheloader.config import NO_DAEMON
from cacheloader.errors import CacheloaderError
from cacheloader.protocol import messages
from cacheloader.transport.control import connect_running

if TYPE_CHECKING:
    from cacheloader.config import TransportOptions
    from cacheloader.transport.link import Link

_SECONDS_PER_REPORT = 4096  # nine bytes each: well below the limit of a message


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
        self._due_s = float("inf") if options.daemon == NO_DAEMON else 0.0

    def add(self, fetch_seconds: float, num_samples: int) -> None:
        """Take one batch's waiting time into the next report."""
        if self._due_s == float("inf"):
            return
        self._seconds.append(fetch_seconds)
        self._samples += num_samples
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + self.PERIOD_S
            self._send(now_s + self.PATIENCE_S)

    def flush(self) -> None:
        """Send what is left, at the end of an epoch."""
        if self._seconds and self._due_s < float("inf"):
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
                self._link = connect_running(self._options, deadline)
                self._link.hello(deadline=deadline)
            for start in range(0, len(seconds), _SECONDS_PER_REPORT):
                part = seconds[start : start + _SECONDS_PER_REPORT]
                self._link.send(messages.Report(fetch_seconds=part, samples=samples), deadline=deadline)
                samples = 0
        except (CacheloaderError, TimeoutError):
            self.close()
            self._due_s = deadline + self.RETRY_S
