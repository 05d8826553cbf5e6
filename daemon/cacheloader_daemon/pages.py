"""Pages of the kernel's cache: written back early while a shard arrives, let go when nobody reads it any more.

Source: sync_file_range(2), posix_fadvise(2).
"""

from __future__ import annotations

import ctypes
import os

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_library = ctypes.CDLL(None, use_errno=True)


def begin_write_back(fd: int, offset: int, size_bytes: int) -> None:
    """Let the disk begin with these bytes of the file, so that unwritten pages stay few; an advice, never an error."""
    _sync_file_range(fd, offset, size_bytes, _WRITE)


def let_go(fd: int) -> None:
    """Write back what is unwritten and drop the file's pages from memory; takes as long as the disk takes."""
    _sync_file_range(fd, 0, 0, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_file_range(fd: int, offset: int, size_bytes: int, flags: int) -> None:
    _library.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size_bytes), ctypes.c_uint(flags))
