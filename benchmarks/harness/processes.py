"""CPU time and memory of process trees, from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """One process.

    Attributes:
        parent: Process id of its parent.
        session: Its session id.
        cpu_s: User and system time of itself and of the children that it has collected.
    """

    parent: int
    session: int
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All processes at one moment.

    Attributes:
        stats: By process id.
        busy_s: CPU time that all processes and kernel threads have used since the machine started.
        interrupts_s: CPU time in interrupts, which is nobody's: most of it moves packets of the loopback here.
        steal_s: CPU time that the hypervisor has withheld.
    """

    stats: dict[int, ProcessStat]
    busy_s: float
    interrupts_s: float
    steal_s: float

    @classmethod
    def take(cls) -> Self:
        """Now."""
        stats: dict[int, ProcessStat] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208  (half the time of Path.iterdir)
            if name.isdigit():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    stats[int(name)] = _parse(Path("/proc", name, "stat").read_text())
        busy_s, interrupts_s, steal_s = machine_cpu_s()
        return cls(stats=stats, busy_s=busy_s, interrupts_s=interrupts_s, steal_s=steal_s)

    def tree(self, root: int) -> set[int]:
        """``root`` and all its descendants that still run."""
        children: dict[int, list[int]] = {}
        for pid, stat in self.stats.items():
            children.setdefault(stat.parent, []).append(pid)
        found: set[int] = set()
        pending = [root] if root in self.stats else []
        while pending:
            pid = pending.pop()
            if pid not in found:
                found.add(pid)
                pending += children.get(pid, [])
        return found

    def by_session(self, root: int) -> tuple[set[int], set[int]]:
        """The tree of ``root`` in two: processes of its own session, and those that were sent off into another."""
        members = self.tree(root)
        own = {pid for pid in members if self.stats[pid].session == self.stats[root].session}
        return own, members - own

    def cpu_s(self, pids: set[int]) -> float:
        """CPU time of these processes."""
        return sum(self.stats[pid].cpu_s for pid in pids)


def machine_cpu_s() -> tuple[float, float, float]:
    """CPU time of the whole machine: in processes, in interrupts, and withheld by the hypervisor."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system) / _TICKS_PER_S, (irq + softirq) / _TICKS_PER_S, steal / _TICKS_PER_S


def peak_rss_bytes(pid: int) -> int:
    """Peak resident size since the start or the last reset, 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak_rss(pid: int) -> None:
    """Let the peak start again at what the process holds now, where this user may do that."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)


def _parse(line: str) -> ProcessStat:
    # The command's name, in parentheses, may hold spaces and parentheses.
    fields = line[line.rindex(")") + 2 :].split()
    return ProcessStat(
        parent=int(fields[1]),
        session=int(fields[3]),
        cpu_s=sum(map(int, fields[11:15])) / _TICKS_PER_S,
    )


def context_switches(pid: int) -> dict[int, int]:
    """For each thread of a process, how often it went to sleep of its own accord, and so was woken; {} if it ended."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for thread in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                for line in (thread / "status").read_text().splitlines():
                    if line.startswith("voluntary_ctxt_switches:"):
                        found[int(thread.name)] = int(line.split()[1])
    return found
