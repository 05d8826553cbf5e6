"""The log stays short whatever happens."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cacheloader_daemon.logs import MAX_LOG_BYTES, MOST_PER_WINDOW, WINDOW_S, FloodGate

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_daemon import NodeDaemon


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("daemon", logging.INFO, "file.py", 1, message, args, None)


def test_a_flood_of_one_kind_is_cut_and_other_kinds_are_not() -> None:
    now_s = [0.0]
    gate = FloodGate(clock=lambda: now_s[0])
    lines = [record("closing %d", number) for number in range(1000)]
    written = [line.getMessage() for line in lines if gate.filter(line)]
    assert len(written) == MOST_PER_WINDOW
    assert written[0] == "closing 0"
    assert written[-1].startswith(f"closing {MOST_PER_WINDOW - 1} (no more such lines")
    assert gate.filter(record("another kind"))
    now_s[0] = WINDOW_S
    assert gate.filter(record("closing %d", 7))


def test_the_log_of_a_private_daemon_is_emptied_while_it_runs(daemons: Callable[..., NodeDaemon]) -> None:
    daemon = daemons().start()
    with daemon.log_path.open("ab") as log:
        log.write(b"long ago\n" * (MAX_LOG_BYTES // 9 + 1))
    with daemon.connect() as client:
        client.say(b"garbage")  # is logged
        wait_until(lambda: daemon.log_path.stat().st_size < MAX_LOG_BYTES)
    wait_until(lambda: "closing a connection" in daemon.log)
    assert "long ago" not in daemon.log
