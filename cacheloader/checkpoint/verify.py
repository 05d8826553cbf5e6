"""Does a folder hold what its commit record says? Answers are reasons, empty when all is well."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import google_crc32c

from cacheloader.checkpoint.commit import COMMIT_FILE, decode
from cacheloader.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cacheloader.checkpoint.commit import Commit
    from cacheloader.checkpoint.store import File, Store

CHUNK_BYTES = 8 * 2**20
RETRIES_AFTER_S = (0.5, 2.0)
"""A file that cannot be read is tried again after so long; most such errors pass."""


class Unreadable(CheckpointError):
    """Files could not be read, so nobody knows whether their bytes are right."""


def read_commit(store: Store, folder: str) -> Commit:
    """The commit record of a folder.

    Raises:
        CheckpointError: There is none, or it cannot be believed.
    """
    try:
        with store.reading(f"{folder}/{COMMIT_FILE}") as stream:
            commit = decode(stream.read())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise CheckpointError(
            f"no {COMMIT_FILE}: the save was interrupted, is still under way, or is none of cacheloader's"
        ) from error
    if str(commit.name) != folder:
        raise CheckpointError(f"its {COMMIT_FILE} belongs to {commit.name}; the folder was renamed or copied over")
    return commit


def wrong_size(commit: Commit, files: Mapping[str, File]) -> str:
    """Why the sizes that the store reports do not fit; every file is looked at, only sizes are read.

    Args:
        commit: What should be there.
        files: What is there, from ``Store.files``.
    """
    missing = sorted(set(commit.files) - set(files))
    if missing:
        return f"{missing[0]} is missing" + (f", and {len(missing) - 1} more files" if missing[1:] else "")
    for name, part in sorted(commit.files.items()):
        if files[name].size_bytes != part.size_bytes:
            return f"{name} has {files[name].size_bytes:,} bytes and was committed with {part.size_bytes:,}"
    return ""


def wrong_bytes(store: Store, commit: Commit, names: Iterable[str]) -> str:
    """Why the bytes of some files are not those that were written; they are read to the end.

    Raises:
        Unreadable: A file cannot be read, several times in a row; that says nothing about its bytes.
    """
    for name in names:
        part = commit.files[name]
        checksum, size_bytes = _read_again(store, f"{commit.name}/{name}")
        if size_bytes != part.size_bytes:
            return f"{name} has {size_bytes:,} bytes and was committed with {part.size_bytes:,}"
        if checksum != part.crc32c:
            return f"{name} has checksum {checksum:08x} and was written with {part.crc32c:08x}: its bytes have changed"
    return ""


def finding(store: Store, commit: Commit, names: Iterable[str]) -> tuple[bool, str]:
    """Whether bytes are wrong, and what is the matter, if anything is; files that cannot be read are not wrong."""
    try:
        reason = wrong_bytes(store, commit, names)
    except Unreadable as error:
        return False, error.message
    return bool(reason), reason


def _read_again(store: Store, path: str) -> tuple[int, int]:
    """Checksum and length of a file; errors are given time to pass."""
    for wait_s in (*RETRIES_AFTER_S, None):
        checksum, size_bytes = 0, 0
        try:
            with store.reading(path) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    checksum = google_crc32c.extend(checksum, chunk)
                    size_bytes += len(chunk)
        except Exception as error:  # each file system has its own
            if wait_s is None:
                name = path.partition("/")[2]
                raise Unreadable(
                    f"{name} cannot be read now ({type(error).__name__}: {error}), so it is not known whether it is "
                    "whole; look at the store, and start again to resume from it"
                ) from error
            time.sleep(wait_s)
        else:
            return checksum, size_bytes
    raise AssertionError("the last try returns or raises")


def share_of(commit: Commit, *, rank: int, world_size: int) -> list[str]:
    """The files whose bytes one rank reads, so that all ranks together read each file once and about equally much."""
    by_size = sorted(commit.files, key=lambda name: (-commit.files[name].size_bytes, name))
    return by_size[rank::world_size]
