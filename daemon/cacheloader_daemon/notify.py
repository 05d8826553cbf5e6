"""What systemd is told: ready, alive, stopping. Does nothing where nobody listens.

Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, MutableMapping

log = logging.getLogger(__name__)


class Notifier:
    """Sends states to the supervisor named by ``NOTIFY_SOCKET``."""

    def __init__(self, environment: MutableMapping[str, str], *, pid: int) -> None:
        """Read what the supervisor wants; its variables are removed, so that no child speaks in our name."""
        self._address = environment.pop("NOTIFY_SOCKET", "")
        watchdog_us = environment.pop("WATCHDOG_USEC", "")
        watchdog_pid = environment.pop("WATCHDOG_PID", "")
        is_for_us = watchdog_us.isdecimal() and watchdog_pid in {"", str(pid)}
        self._interval_s = int(watchdog_us) / 2e6 if is_for_us else 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ready(self, status: str) -> None:
        """The socket accepts."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """The daemon is on its way out."""
        if self._timer is not None:
            self._timer.cancel()
        self._send("STOPPING=1")

    def watch(self, loop: asyncio.AbstractEventLoop, is_well: Callable[[], bool]) -> None:
        """Answer the watchdog from the loop itself, for as long as ``is_well``; a stuck loop is then restarted."""
        if self._interval_s == 0.0:
            return

        def beat() -> None:
            if is_well():
                self._send("WATCHDOG=1")
            self._timer = loop.call_later(self._interval_s, beat)

        beat()

    def _send(self, state: str) -> None:
        if not self._address:
            return
        # "@" stands for the zero byte of the abstract name space.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(1.0)
                sock.sendto(state.encode(), address)
        except OSError as error:
            log.warning("the supervisor at %s was not told %r: %s", self._address, state, error)
