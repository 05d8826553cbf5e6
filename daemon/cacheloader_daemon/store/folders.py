"""Directories by descriptor: what is done through one stays below it, whatever is mounted over its path meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import os

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def open_folder(path: str, *, dir_fd: int) -> int:
    """A descriptor of a directory, owned by the caller; a link is refused."""
    return os.open(path, _FLAGS, dir_fd=dir_fd)


def ensure_folder(path: str, *, dir_fd: int) -> int:
    """As ``open_folder``, of a directory that is made, for us alone, if it is missing."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=dir_fd)
    return open_folder(path, dir_fd=dir_fd)


def names_in(path: str, *, dir_fd: int) -> list[str]:
    """Names of everything in a directory, in no promised order."""
    folder_fd = open_folder(path, dir_fd=dir_fd)
    try:
        return os.listdir(folder_fd)  # noqa: PTH208 - a Path has no descriptor
    finally:
        os.close(folder_fd)


def unlink_if_there(path: str, *, dir_fd: int) -> None:
    """Remove a file; one that is gone already does not matter."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path, dir_fd=dir_fd)


def sync_file_system(fd: int) -> None:
    """Bring everything on the file system of an open file to the disk.

    Source: syncfs(2), which Python does not have.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
