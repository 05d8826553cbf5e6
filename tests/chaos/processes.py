"""The processes of one run, found by a mark in their environment that all descendants inherit."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal

MARK = "CACHELOADER_CHAOS_RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a run.

    Attributes:
        pid: Its number.
        parent: Its parent's.
        role: ``launcher``, ``rank``, ``worker``, ``daemon``, ``indexer``, ``helper`` or ``other``.
    """

    pid: int
    parent: int
    role: str


def carriers(variable: str, value: str) -> list[Path]:
    """The folder in ``/proc`` of every process that was started with this in its environment."""
    wanted = f"{variable}={value}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder)
    return found


def marked(mark: str) -> list[Process]:
    """Every living process that carries ``mark``."""
    found = []
    for folder in carriers(MARK, mark):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z" and command:
            found.append(Process(pid=int(folder.name), parent=int(parent), role=_role(command)))
    ranks = {process.pid for process in found if process.role == "rank"}
    return [
        Process(pid=process.pid, parent=process.parent, role="worker")
        if process.role == "rank" and process.parent in ranks
        else process
        for process in found
    ]


def _role(command: str) -> str:
    for text, role in (
        ("tests.chaos.launcher", "launcher"),
        ("tests.chaos.trainer", "rank"),
        ("cacheloader_daemon.indexer", "indexer"),
        ("cacheloader_daemon", "daemon"),
        ("direct_worker", "helper"),
    ):
        if text in command:
            return role
    return "other"


def send(process: Process, number: signal.Signals) -> bool:
    """Signal a process; whether it was still there."""
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True
