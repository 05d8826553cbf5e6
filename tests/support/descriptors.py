"""What files a process has open."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def open_fds() -> int:
    """Descriptors of this process, without those of garbage, which an earlier test may have left."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def links_of(pid: int) -> list[str]:
    """What each descriptor of a living process points to, without those that it closed while they were read."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    return links
