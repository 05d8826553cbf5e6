"""The lock that one process holds while it starts what others wait for.

Source: flock(2).
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING

from cacheloader.errors import DeadlineExceeded
from cacheloader.transport.endpoint import pause_s

if TYPE_CHECKING:
    from pathlib import Path

LONGEST_BACKOFF = 2
"""Attempts after which the pause between them (see ``pause_s``) grows no more: what is waited for comes in moments."""


def take_lock(path: Path, *, deadline: float) -> int:
    """A descriptor that holds the lock file at ``path`` until it is closed, in whatever way this process ends.

    Args:
        path: Made if it is missing.
        deadline: On the clock of ``time.monotonic``.

    Raises:
        DeadlineExceeded: Another process holds it for too long.
        OSError: It cannot be made or locked.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _wait_for(lock, path, deadline)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _wait_for(lock: int, path: Path, deadline: float) -> None:
    attempt = 0
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"another process holds {path} and what it starts does not get ready; `fuser {path}` names it"
                ) from error
            # flock knows no deadline of its own.
            time.sleep(pause_s(min(attempt, LONGEST_BACKOFF)))
            attempt += 1
        else:
            return
