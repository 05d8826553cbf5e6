"""Which files the kernel holds in memory."""

from __future__ import annotations

import ctypes
import mmap
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
    """Read each file that is not in memory as a whole."""
    block = bytearray(_BLOCK_BYTES)
    for path in paths:
        if is_resident(path):
            continue
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def is_resident(path: Path) -> bool:
    """Whether the kernel holds every page of a file of this user in memory."""
    import numpy as np

    if not path.stat().st_size:
        return True
    with path.open("rb") as file:
        # Never closed but freed with its view: closed in between, by whatever interrupts this, it would raise.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapping, dtype=np.uint8)
    pages = np.zeros(-(-len(view) // mmap.PAGESIZE), dtype=np.uint8)
    failed = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), ctypes.c_void_p(pages.ctypes.data)
    )
    return not failed and bool((pages & 1).all())


def drop(paths: Iterable[Path]) -> None:
    """Write each file back and let the kernel forget its pages."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
