"""Free memory that is there: a virtual machine gives back what it does not use, and gets it again page by page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SIZE_BYTES = 3 * 2**30
"""More than any contestant takes in a run, its files included."""

_TAKE = "import mmap, sys; mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)"


def available_bytes() -> int:
    """What the kernel could give without swapping. Source: ``/proc/meminfo``."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def back(size_bytes: int = SIZE_BYTES) -> int:
    """Take memory and give it back, so that the host has it ready for the next few seconds.

    Without this a run costs up to twice the CPU if those before it have left the machine's memory unused for a while,
    and the same contestant is fast or slow with what happened to run before it.

    Args:
        size_bytes: How much; never more than half of what is available.

    Returns:
        How much it was.
    """
    taken_bytes = min(size_bytes, available_bytes() // 2)
    # By a process of its own: this one's peak is what the report shows.
    subprocess.run([sys.executable, "-I", "-S", "-c", _TAKE, str(taken_bytes)], check=True)
    return taken_bytes
