"""Local paths and mounted volumes (NFS, Lustre, FUSE), read by a bounded pool of threads."""

from __future__ import annotations

import errno
import os
import stat as stat_bits
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiofiles.os import wrap

from cacheloader.errors import (
    OriginChanged,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginShortBody,
    OriginTimeout,
    OriginUnavailable,
)
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.failure import failure, reading
from cacheloader.origin.threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from cacheloader.keys import ByteRange

DEFAULT_THREADS = 16
"""As many as the ranges that one node usually has in flight; a hung call holds one until the mount answers."""

_FILE = "file://"
_DENIED = {errno.EACCES, errno.EPERM}
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
# ESTALE: the file behind an NFS handle was replaced; opening it anew, as a retry does, gets the new one.
_BROKEN = {errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EREMOTEIO, errno.ENXIO, errno.ENODEV}


class MountOrigin:
    """Files below `/`. A file's version is its modification time in nanoseconds and its size.

    Args:
        max_threads: Calls into the file system at a time.
        within: Folders and files outside of which nothing is opened, wherever links and ``..`` lead; ``None`` for no
            such bound. Asked of what is open, so that a link that changes meanwhile is no way around.
    """

    def __init__(self, *, max_threads: int = DEFAULT_THREADS, within: Sequence[str] | None = None) -> None:
        self._threads = DaemonThreads(max_threads, name="mount")
        self._within = None if within is None else tuple(within)

    @property
    def origin_id(self) -> str:
        """`file://`: a path means the same volume on all nodes of a job, so no host stands here."""
        return _FILE

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Every file below the directory ``prefix``; links are followed, a directory met twice is entered once."""
        pending, entered = [prefix.rstrip("/") + "/"], set[tuple[int, int]]()
        while pending:
            directory = pending.pop()
            with _errors("listing", directory):
                files, below = await wrap(_scan)(directory, entered, self._within, executor=self._threads)
            pending += below
            for info in files:
                yield info

    async def stat(self, uri: str) -> ObjectInfo:
        """Size and version of the file ``uri``."""
        with _errors("describing", uri):
            info: ObjectInfo = await wrap(_describe)(uri, self._within, executor=self._threads)
            return info

    async def read_range(self, uri: str, byte_range: ByteRange, *, version: str) -> bytes:
        """Bytes of the file ``uri``; that it is still ``version`` is checked before and after."""
        with _errors(reading(byte_range), uri):
            body: bytes = await wrap(_read)(uri, byte_range, version, self._within, executor=self._threads)
            return body

    async def aclose(self) -> None:
        """Let the threads end; one that hangs is left behind and does not keep the process alive."""
        self._threads.shutdown()


def path_of(uri: str) -> str:
    """The path that ``uri`` (a path, or `file://` and a path) names."""
    return uri.removeprefix(_FILE)


def _scan(
    directory: str, entered: set[tuple[int, int]], within: tuple[str, ...] | None
) -> tuple[list[ObjectInfo], list[str]]:
    descriptor = _opened(path_of(directory), os.O_RDONLY | os.O_DIRECTORY, within)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) in entered:
            return [], []
        entered.add((status.st_dev, status.st_ino))
        files, below = [], []
        with os.scandir(descriptor) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue  # a dangling link, or removed since
                if within is not None and entry.is_symlink() and not _leads_into(within, directory, entry.name):
                    continue
                if stat_bits.S_ISDIR(status.st_mode):
                    below.append(f"{directory}{entry.name}/")
                elif stat_bits.S_ISREG(status.st_mode):
                    files.append(_info(f"{directory}{entry.name}", status))
        return files, below
    finally:
        os.close(descriptor)


def _describe(uri: str, within: tuple[str, ...] | None) -> ObjectInfo:
    descriptor = _opened(path_of(uri), os.O_PATH, within)
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if stat_bits.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    return _info(uri, status)


def _opened(path: str, flags: int, within: tuple[str, ...] | None) -> int:
    """A descriptor of ``path``; what lies outside of ``within`` is as if its rights forbade it."""
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    if within is not None and not _lies_within(os.readlink(f"/proc/self/fd/{descriptor}"), within):  # noqa: PTH115
        os.close(descriptor)
        raise PermissionError(errno.EACCES, "a link leads out of the folders that may be read")
    return descriptor


def _leads_into(within: tuple[str, ...], directory: str, name: str) -> bool:
    return _lies_within(os.path.realpath(f"{path_of(directory)}{name}"), within)


def _lies_within(path: str, within: tuple[str, ...]) -> bool:
    roots = [os.path.realpath(root).rstrip("/") for root in within]
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def _read(uri: str, byte_range: ByteRange, version: str, within: tuple[str, ...] | None) -> bytes:
    # Strangers may have left a pipe there, and one without a writer would hold this thread for ever.
    descriptor = _opened(path_of(uri), os.O_RDONLY | (os.O_NONBLOCK if within is not None else 0), within)
    try:
        _check_version(uri, byte_range, version, os.fstat(descriptor))
        parts, start = [], byte_range.start
        while start < byte_range.stop:
            part = os.pread(descriptor, byte_range.stop - start, start)
            if not part:
                break
            parts.append(part)
            start += len(part)
        _check_version(uri, byte_range, version, os.fstat(descriptor))
    finally:
        os.close(descriptor)
    if start != byte_range.stop:
        cause = f"the file ended {byte_range.stop - start} bytes early"
        raise failure(OriginShortBody, action=reading(byte_range), uri=uri, cause=cause)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_version(uri: str, byte_range: ByteRange, version: str, status: os.stat_result) -> None:
    found = _version(status)
    if version and found != version:
        cause = f"the file is now version {found} and the manifest names {version}"
        raise failure(OriginChanged, action=reading(byte_range), uri=uri, cause=cause)


def _info(uri: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(uri=uri, size_bytes=status.st_size, version=_version(status))


def _version(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_size}"


@contextmanager
def _errors(action: str, uri: str) -> Iterator[None]:
    """Every ``OSError`` of a file system as one of ours."""
    try:
        yield
    except OSError as error:
        kind, way_out = _kind(error)
        cause = error.strerror or type(error).__name__
        raise failure(kind, action=action, uri=uri, cause=cause.lower(), way_out=way_out) from error
    except ValueError as error:  # a path with a null byte
        raise failure(OriginNotFound, action=action, uri=uri, cause=str(error)) from error


def _kind(error: OSError) -> tuple[type[OriginError], str]:
    if error.errno in _DENIED:
        return OriginDenied, "give the user that runs the daemon the right to read it"
    if error.errno in _MISSING:
        return OriginNotFound, "check the path and that the volume is mounted on this node"
    if error.errno == errno.ETIMEDOUT:
        return OriginTimeout, "check the mount"
    if error.errno in _BROKEN:
        return OriginUnavailable, "check the mount"
    return OriginError, "check the mount"
