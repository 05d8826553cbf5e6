"""A disk that fails on demand, for a daemon in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).with_suffix(".c")

CHANGES = ("create", "pwrite", "fallocate", "fsync", "mkdir", "unlink", "rename")
"""All calls that change something."""


@dataclass(frozen=True, kw_only=True)
class DiskFault:
    """What to start the daemon with, and the switch.

    Attributes:
        library: To be preloaded.
        control: The file that says what fails.
        directory: Below it calls fail.
    """

    library: Path
    control: Path
    directory: Path

    @classmethod
    def build(cls, folder: Path, directory: Path) -> DiskFault:
        """Compile the library in ``folder``; the test is skipped where there is no compiler."""
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        library = folder / "disk_fault.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True, timeout=60
        )
        return cls(library=library, control=folder / "disk_fault", directory=directory)

    @property
    def environment(self) -> dict[str, str]:
        """Of the daemon."""
        return {
            "LD_PRELOAD": str(self.library),
            "DISK_FAULT_CONTROL": str(self.control),
            "DISK_FAULT_DIRECTORY": str(self.directory),
        }

    @contextmanager
    def failing(self, number: int, *calls: str) -> Iterator[None]:
        """Meanwhile these calls end with the error ``number``."""
        new = self.control.with_suffix(".new")
        new.write_text(f"{number} {' '.join(calls)}\n")
        new.rename(self.control)
        try:
            yield
        finally:
            self.control.unlink()
