"""What a supervisor hears."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

import pytest
from cacheloader_daemon.notify import Notifier

from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["path", "abstract"])
async def test_ready_beats_and_stopping_are_told(tmp_path: Path, name: str) -> None:
    address = str(tmp_path / "n") if name == "path" else f"@cacheloader-notify-{os.getpid()}"
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": "7", "HOME": "/"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(address.replace("@", "\0"))
        supervisor.settimeout(60)
        notifier = Notifier(environment, pid=7)
        assert environment == {"HOME": "/"}
        notifier.ready("serving")
        assert supervisor.recv(100) == b"READY=1\nSTATUS=serving"
        well = [True]
        notifier.watch(asyncio.get_running_loop(), lambda: well[0])
        for _ in range(3):
            assert await asyncio.to_thread(supervisor.recv, 100) == b"WATCHDOG=1"
        well[0] = False
        supervisor.settimeout(0.0)

        def is_silent() -> bool:
            try:
                return not supervisor.recv(100)
            except BlockingIOError:
                return True

        await until(is_silent)
        notifier.stopping()
        assert supervisor.recv(100) == b"STOPPING=1"


def test_without_a_supervisor_nothing_happens() -> None:
    notifier = Notifier({}, pid=1)
    notifier.ready("serving")
    notifier.stopping()


def test_a_supervisor_that_is_gone_is_no_reason_to_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}, pid=1).ready("serving")
    assert "was not told" in caplog.text
