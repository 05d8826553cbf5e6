"""Which files the kernel holds in memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_BLOCK_BYTES = 1 << 20


def files_below(folder: Path) -> list[Path]:
    """Regular files, links not followed."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def warm(paths: Iterable[Path]) -> None:
    """Read each file once."""
    block = bytearray(_BLOCK_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def drop(paths: Iterable[Path]) -> None:
    """Write each file back and let the kernel forget its pages."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
