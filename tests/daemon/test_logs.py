"""The log stays short whatever happens."""

from __future__ import annotations

import logging

from cacheloader_daemon.logs import MOST_PER_WINDOW, WINDOW_S, FloodGate


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
