"""Small disks of our own, and a store filled by hand."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import google_crc32c
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cacheloader_daemon.store import Store

QUOTA_BYTES = 2**30


def key(number: int) -> bytes:
    """Keys in different folders."""
    return bytes([number % 256]) + number.to_bytes(15, "big")


def content(number: int, size_bytes: int = 100_000) -> bytes:
    return (number.to_bytes(4, "big") * (size_bytes // 4 + 1))[:size_bytes]


def add(store: Store, number: int, *, size_bytes: int = 100_000, index: bytes | None = None) -> int:
    data = content(number, size_bytes)
    incoming = store.begin(key(number), size_bytes=size_bytes)
    incoming.write_at(0, data)
    return incoming.commit(b"index of %d" % number if index is None else index, google_crc32c.value(data))


def read(store: Store, number: int) -> tuple[bytes, bytes]:
    """Data and index of a blob."""
    leased = store.lease(key(number))
    try:
        return os.pread(leased.data_fd, leased.size_bytes, 0), os.pread(leased.index_fd, leased.index_bytes, 0)
    finally:
        os.close(leased.data_fd)
        os.close(leased.index_fd)


def du_bytes(directory: Path) -> int:
    done = subprocess.run(["du", "-s", "-B1", str(directory)], capture_output=True, text=True, check=True, timeout=30)
    return int(done.stdout.split()[0])


@contextmanager
def mounted(directory: Path, options: str, *, kind: str = "tmpfs", source: str = "none") -> Iterator[None]:
    """A mount for the time of the block; the test is skipped where mounting is not permitted."""
    directory.mkdir(exist_ok=True)
    command = ["mount", "-t", kind, "-o", options, source, str(directory)]
    if subprocess.run(command, capture_output=True, check=False, timeout=30).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True, timeout=30)
