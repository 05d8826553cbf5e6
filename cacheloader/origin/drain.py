"""Waits until obstore's threads are done with this interpreter.

obstore hands each result to the event loop from a thread of its runtime, and that thread takes the interpreter lock
once more to let go of what it held. Should the interpreter be ending by then, Python ends the thread in the middle of
Rust code, and the process aborts (SIGABRT) now and then after all its work was done. The runtime tells nobody when its
threads are through, so we look: a thread that has not run for a while, although the lock was free, wants nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_RUNTIME = "tokio-rt-worker"
# Long against a hand-over of the lock (5 ms at most with a busy Python thread), short against a human.
_QUIET_S = 0.01
_LONGEST_S = 2.0


async def drain() -> None:
    """Return when obstore's threads have been idle for a moment, after 2 s at the latest."""
    stop = time.monotonic() + _LONGEST_S
    seen = _activity()
    while seen and time.monotonic() < stop:
        await asyncio.sleep(_QUIET_S)
        now = _activity()
        if _idle(seen, now):
            return
        seen = now


@functools.cache
def drain_at_exit() -> None:
    """Let the process wait likewise before the interpreter ends; calling it again does nothing."""
    atexit.register(_drain_blocking)


def _drain_blocking() -> None:
    stop = time.monotonic() + _LONGEST_S
    seen = _activity()
    while seen and time.monotonic() < stop:
        time.sleep(_QUIET_S)
        now = _activity()
        if _idle(seen, now):
            return
        seen = now


def _idle(before: dict[str, str], after: dict[str, str]) -> bool:
    return before == after and all(state.startswith("S") for state in after.values())


def _activity() -> dict[str, str]:
    """For each thread of the runtime, a text that changes whenever it ran: state, CPU times, context switches."""
    found: dict[str, str] = {}
    try:
        threads = list(_THREADS.iterdir())
    except OSError:
        return found  # no /proc: nothing to see
    for thread in threads:
        try:
            name, _, fields = (thread / "stat").read_text().partition("(")[2].rpartition(")")
            if name != _RUNTIME:
                continue
            columns = fields.split()
            switches = [line for line in (thread / "status").read_text().splitlines() if "ctxt_switches" in line]
        except OSError:
            continue  # it ended while we looked
        found[thread.name] = " ".join([columns[0], columns[11], columns[12], *switches])
    return found
