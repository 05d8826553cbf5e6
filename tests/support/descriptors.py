"""What files a process has open."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path


def open_fds() -> int:
    """Descriptors of this process, without those of garbage, which an earlier test may have left."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def links_of(pid: int) -> list[str]:
    """What each descriptor of a living process points to, without those that it closed while they were read."""
    return [link for _, link in _descriptors(pid)]


def open_files() -> set[tuple[int, str]]:
    """Number and target of each descriptor of this process, to be compared by ``opened_since``."""
    gc.collect()
    return set(_descriptors(os.getpid()))


def opened_since(before: set[tuple[int, str]]) -> list[str]:
    """What this process has open and had not; nothing, sooner or later, if what was done since then leaks nothing.

    A count would also tell of what an earlier test's threads and servers close at that moment.
    """
    return sorted(target for _, target in open_files() - before)


def _descriptors(pid: int) -> list[tuple[int, str]]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile, as that of the listing is
            found.append((int(entry.name), str(entry.readlink())))
    return found
