"""Append-only files of JSON lines, one write call a line: step records and goodput events have this form in common.

A killed process leaves at most a torn last line, and nothing before it is missing. Lines are not synced one by one; a
machine that loses power loses the last seconds of them.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path


class LineFile:
    """One file that grows by whole lines; a torn one, of this process or an earlier one, is ended before the next.

    Args:
        path: Made if need be.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size_bytes = os.fstat(self._fd).st_size
        self._is_torn = self.size_bytes > 0 and os.pread(self._fd, 1, self.size_bytes - 1) != b"\n"

    def append(self, line: bytes) -> None:
        """Write ``line``, which has its end.

        Raises:
            OSError: The line is not in the file, or only a part of it is.
        """
        if self._is_torn:
            line = b"\n" + line
        written = os.write(self._fd, line)
        self.size_bytes += written
        self._is_torn = written != len(line)
        if self._is_torn:
            raise OSError("the disk took a part of a line")

    def sync(self) -> None:
        """Make what was written durable.

        Raises:
            OSError: The disk failed.
        """
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            self.close()


def num_lines(path: Path) -> int:
    """Lines of a file that were begun: a torn last one counts.

    Raises:
        OSError: The file cannot be read.
    """
    content = path.read_bytes()
    return content.count(b"\n") + (content != b"" and not content.endswith(b"\n"))


def heading(*, version: int, run: str, attempt: str, rank: int, world_size: int) -> str:
    """What all lines of one rank in one attempt say, as JSON without its braces.

    Args:
        version: Of the format.
        run: Name of the run.
        attempt: Name of the launch, the same on all its ranks.
        rank: This process.
        world_size: Ranks of the attempt.
    """
    fields = {
        "v": version,
        "run": run,
        "att": attempt,
        "node": platform.node(),
        "rank": rank,
        "world": world_size,
        "boot": _boot_id(),
    }
    return json.dumps(fields, separators=(",", ":"))[1:-1]


def json_line(event: str, seq: int, head: str, fields: str, at: tuple[int, int] | None = None) -> bytes:
    """One line.

    Args:
        event: Its kind.
        seq: Its number among those of its rank and attempt.
        head: As ``heading`` made it.
        fields: Everything else, as JSON without braces and with a comma in front; "" for nothing.
        at: (wall, monotonic) time in nanoseconds, if it is not now.
    """
    wall_ns, mono_ns = at or (time.time_ns(), time.monotonic_ns())
    return f'{{"ev":"{event}","seq":{seq},"wall_ns":{wall_ns},"mono_ns":{mono_ns},{head}{fields}}}\n'.encode()


def _boot_id() -> str:
    """Identity of the node's boot, "" where the kernel names none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
