"""Small disks of our own, and a store filled by hand."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import google_crc32c
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cacheloader_daemon.store import Pool, Store


def key(number: int) -> bytes:
    """Keys in different folders."""
    return bytes([number % 256]) + number.to_bytes(15, "big")


def content(number: int, size_bytes: int = 100_000) -> bytes:
    return (number.to_bytes(4, "big") * (size_bytes // 4 + 1))[:size_bytes]


def add(store: Store | Pool, number: int, *, size_bytes: int = 100_000, index: bytes | None = None) -> int:
    data = content(number, size_bytes)
    incoming = store.begin(key(number), size_bytes=size_bytes)
    incoming.write_at(0, data)
    return incoming.commit(b"index of %d" % number if index is None else index, google_crc32c.value(data))


def read(store: Store | Pool, number: int) -> tuple[bytes, bytes]:
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


def file_of(directory: Path, number: int, kind: str) -> Path:
    return next((directory / "blobs" / key(number)[:1].hex()).glob(f"{key(number).hex()}-*.{kind}"))


def flip_bit(path: Path) -> None:
    mode = path.stat()
    block = bytearray(path.read_bytes())
    block[len(block) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(block)
    path.chmod(0o440)
    os.utime(path, ns=(mode.st_mtime_ns, mode.st_mtime_ns))


def fill(disk: Path, *, but_bytes: int = 0) -> Path:
    """Leave no more than so many bytes free."""
    path = disk / "filler"
    with path.open("wb") as file:
        found = os.fstatvfs(file.fileno())
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - but_bytes)
    return path


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
        subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=30)


_CHANGES = ("mkdir", "rename", "unlink", "posix_fallocate", "pwrite", "utime", "fsync")


@contextmanager
def refusing(directory: Path, number: int, *, calls: Sequence[str] = ("open", *_CHANGES)) -> Iterator[None]:
    """Every system call that would change something on the disk of ``directory`` fails with ``number`` meanwhile."""
    device = directory.stat().st_dev

    def is_there(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        fds = [kwargs[name] for name in ("dir_fd", "dst_dir_fd") if name in kwargs]
        fds += [arg for arg in args[:1] if isinstance(arg, int)]
        return any(os.fstat(fd).st_dev == device for fd in fds)

    def refuse(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            changes = name != "open" or args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
            if changes and is_there(args, kwargs):
                raise OSError(number, os.strerror(number))
            return call(*args, **kwargs)

        return watched

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, refuse(name, getattr(os, name)))
        yield
