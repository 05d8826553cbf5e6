"""How many bytes things take on disk, in the file system's blocks, which is what ``du`` and a full disk count."""

from __future__ import annotations

import os
import stat

from cacheloader_daemon.store.folders import names_in

BLOCK_BYTES = 4096

INDEX_FRACTION = 8
INDEX_BASE_BYTES = 64 * 2**10
"""A tar sample index takes 24 bytes a member and the names, of at least 1,024 bytes of tar a member: under a tenth,
short of archives of empty files with very long names. JSON lines of 64 bytes need 8 bytes each: an eighth."""

EXTENT_BYTES = 64 * 2**20
"""A file in many pieces needs blocks for the list of its pieces: one is reserved for each of so many bytes."""


def index_bound_bytes(size_bytes: int) -> int:
    """The most that the sample index of a shard of ``size_bytes`` may take; a longer one is not stored."""
    return size_bytes // INDEX_FRACTION + INDEX_BASE_BYTES


def reserve_bytes(size_bytes: int, *, block_bytes: int = BLOCK_BYTES) -> int:
    """Upper bound of what a shard and its sample index take on disk, in whole blocks.

    Args:
        size_bytes: Length of the shard.
        block_bytes: Unit in which the file system allocates.
    """
    return bound_bytes(size_bytes, index_bound_bytes(size_bytes), block_bytes=block_bytes)


def bound_bytes(size_bytes: int, index_bytes: int, *, block_bytes: int = BLOCK_BYTES) -> int:
    """Upper bound of what a shard and an index of known length take on disk, in whole blocks.

    Args:
        size_bytes: Length of the shard.
        index_bytes: Length of its sample index.
        block_bytes: Unit in which the file system allocates.
    """
    lists = block_bytes * (1 + size_bytes // EXTENT_BYTES)
    return _blocks(size_bytes, block_bytes) + _blocks(index_bytes, block_bytes) + lists


def allocated_bytes(status: os.stat_result) -> int:
    """What one file or directory takes on disk."""
    return status.st_blocks * 512


def tree_bytes(path: str, *, dir_fd: int) -> int:
    """What ``path`` takes with everything below it; what vanishes meanwhile does not count.

    Args:
        path: Relative to ``dir_fd``; links are not followed.
        dir_fd: An open directory.
    """
    try:
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        names = names_in(path, dir_fd=dir_fd) if stat.S_ISDIR(status.st_mode) else []
    except FileNotFoundError:
        return 0
    return allocated_bytes(status) + sum(tree_bytes(f"{path}/{name}", dir_fd=dir_fd) for name in names)


def _blocks(size_bytes: int, block_bytes: int) -> int:
    return -(-size_bytes // block_bytes) * block_bytes
