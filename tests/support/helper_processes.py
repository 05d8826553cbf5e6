"""The helper processes that read without a daemon, as the system lists them."""

from __future__ import annotations

from pathlib import Path


def command(pid: int) -> str:
    """A process's command line, "" if it is not there or has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def helpers(folder: Path | str) -> list[int]:
    """Every helper, of any process, that keeps its manifests below ``folder``; those of other tests have others."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    lines = {pid: command(pid) for pid in pids}
    return [pid for pid, line in lines.items() if "direct_worker" in line and f"--manifest-dir {folder}/" in line]
