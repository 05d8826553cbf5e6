"""The two files of a blob: made, opened, verified, flushed and removed, always below one open directory."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import google_crc32c

from cacheloader_daemon.store import space
from cacheloader_daemon.store.folders import ensure_folder, sync_file_system, unlink_if_there
from cacheloader_daemon.store.names import BlobName, folder_of, temporary_name
from cacheloader_daemon.store.trouble import DiskTrouble, disk_trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cacheloader_daemon.store.incoming import Incoming

_CHECK_BYTES = 2**20


class BlobGone(Exception):
    """A file is missing, is not as long as its name says, cannot be read, or holds other bytes than were stored.

    Args:
        what: What is wrong.
        error: What the operating system said, if it said something.
    """

    def __init__(self, what: str, error: OSError | None = None) -> None:
        super().__init__(what)
        self.error = error

    @property
    def is_missing(self) -> bool:
        """Whether there is nothing left to look at."""
        return self.error is not None and self.error.errno == errno.ENOENT


class BlobFiles:
    """The directory ``blobs``.

    Args:
        blobs_fd: The directory; stays open while this is used.
        block_bytes: Unit in which its file system allocates.
    """

    def __init__(self, blobs_fd: int, *, block_bytes: int) -> None:
        self._blobs_fd = blobs_fd
        self.block_bytes = block_bytes

    def open_folder(self, key: bytes) -> int:
        """A descriptor of the folder for ``key``, made if it is missing; owned by the caller."""
        folder = folder_of(key)
        with disk_trouble("opening a folder", f"blobs/{folder}"):
            return ensure_folder(folder, dir_fd=self._blobs_fd)

    def stage(self, incoming: Incoming, index: bytes, crc32c: int) -> tuple[BlobName, int]:
        """Put the sample index of a finished download in its place, where it means nothing without the data file.

        Returns:
            The blob's name, and the bytes that both files take: at most what was reserved.

        Raises:
            DiskTrouble: The disk does not take it, or more space would be needed than is reserved.
        """
        bound_bytes = space.index_bound_bytes(incoming.size_bytes)
        if len(index) > bound_bytes:
            raise DiskTrouble(
                errno.EFBIG,
                f"the sample index takes {len(index)} bytes; {bound_bytes} are reserved for that of a shard of "
                f"{incoming.size_bytes} bytes",
                incoming.key.hex(),
            )
        name = BlobName(
            key=incoming.key,
            size_bytes=incoming.size_bytes,
            crc32c=crc32c,
            index_bytes=len(index),
            index_crc32c=int(google_crc32c.value(index)),
        )
        temporary, folder_fd = temporary_name(incoming.key), incoming.folder_fd
        with disk_trouble("publishing a shard", f"blobs/{name.folder}/{name.data}"):
            try:
                used_bytes = _write_file(temporary, index, folder_fd)
                os.fchmod(incoming.fd, 0o440)
                used_bytes += space.allocated_bytes(os.fstat(incoming.fd))
                self._refuse_large(used_bytes, name)
                os.rename(temporary, name.index, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            except BaseException:
                unlink_if_there(temporary, dir_fd=folder_fd)
                raise
        return name, used_bytes

    def publish(self, incoming: Incoming, name: BlobName, stamp_ns: int) -> None:
        """Give the data file of a staged download its name; quick, and from then on the blob is there.

        Args:
            incoming: The download.
            name: What ``stage`` returned.
            stamp_ns: Modification time to set, by which a later start tells whether it had reached the disk.
        """
        with disk_trouble("publishing a shard", f"blobs/{name.folder}/{name.data}"):
            os.utime(incoming.fd, ns=(stamp_ns, stamp_ns))
            os.rename(incoming.temporary, name.data, src_dir_fd=incoming.folder_fd, dst_dir_fd=incoming.folder_fd)

    def open(self, name: BlobName) -> tuple[int, int]:
        """Fresh read-only descriptors of data and index, owned by the caller.

        Raises:
            BlobGone: A file is missing or has another length.
        """
        data_fd = self._open_file(name, name.data, name.size_bytes)
        try:
            return data_fd, self._open_file(name, name.index, name.index_bytes)
        except BaseException:
            os.close(data_fd)
            raise

    def verify(self, name: BlobName, sum_up: Callable[[int, int], int] | None = None) -> None:
        """Compare both files with the checksums in their name.

        Args:
            name: The blob.
            sum_up: Gives the CRC32C of an open file of a length; ``None`` for reading it as fast as it goes.

        Raises:
            BlobGone: They differ, or cannot be read.
        """
        data_fd, index_fd = self.open(name)
        try:
            sum_up = sum_up or _crc32c
            found = sum_up(data_fd, name.size_bytes), sum_up(index_fd, name.index_bytes)
        except OSError as error:
            raise BlobGone(f"blobs/{name.folder}/{name.data} cannot be read: {error.strerror}", error) from error
        finally:
            os.close(data_fd)
            os.close(index_fd)
        if found != (name.crc32c, name.index_crc32c):
            raise BlobGone(f"blobs/{name.folder}/{name.data} or its index does not hold the bytes that were stored")

    def stamp_ns(self, name: BlobName) -> int:
        """The time stamp that the blob was published with.

        Raises:
            BlobGone: It cannot be looked at.
        """
        try:
            return os.stat(f"{name.folder}/{name.data}", dir_fd=self._blobs_fd, follow_symlinks=False).st_mtime_ns
        except OSError as error:
            raise BlobGone(f"blobs/{name.folder}/{name.data}: {error.strerror}", error) from error

    def used_bytes(self, name: BlobName) -> int:
        """What the blob takes on disk; a file that is gone takes nothing."""
        total = 0
        for file in (name.data, name.index):
            try:
                total += space.allocated_bytes(os.stat(f"{name.folder}/{file}", dir_fd=self._blobs_fd))
            except FileNotFoundError:
                continue
        return total

    def reserve_bytes(self, size_bytes: int) -> int:
        """What has to be reserved for a shard of ``size_bytes``."""
        return space.reserve_bytes(size_bytes, block_bytes=self.block_bytes)

    def remove(self, name: BlobName) -> int:
        """Unlink both files; returns the bytes they took, which are free once nobody has them open."""
        with disk_trouble("removing a shard", f"blobs/{name.folder}/{name.data}"):
            used_bytes = self.used_bytes(name)
            for file in (name.data, name.index):
                unlink_if_there(f"{name.folder}/{file}", dir_fd=self._blobs_fd)
            return used_bytes

    def probe(self) -> None:
        """Make a file, bring it to the disk and remove it."""
        temporary = temporary_name(bytes(16))
        try:
            _write_file(temporary, b"probe", self._blobs_fd)
            self._sync(temporary, os.O_RDONLY)
        finally:
            unlink_if_there(temporary, dir_fd=self._blobs_fd)

    def remove_rubbish(self, rubbish: Iterable[tuple[str, str]]) -> None:
        """Unlink files by (folder, name)."""
        for folder, file in rubbish:
            unlink_if_there(f"{folder}/{file}", dir_fd=self._blobs_fd)

    def flush(self, names: Iterable[BlobName] | None) -> None:
        """Bring blobs to the disk, with their names; those that are gone do not matter.

        Args:
            names: Which; ``None`` for all, and whatever else lies on their file system.
        """
        with disk_trouble("flushing shards", "blobs"):
            if names is None:
                sync_file_system(self._blobs_fd)
                return
            folders = set()
            for name in names:
                for file in (name.data, name.index):
                    self._sync(f"{name.folder}/{file}", os.O_RDONLY)
                folders.add(name.folder)
            for folder in folders:
                self._sync(folder, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(self._blobs_fd)

    def _refuse_large(self, used_bytes: int, name: BlobName) -> None:
        if used_bytes > self.reserve_bytes(name.size_bytes):
            raise DiskTrouble(
                errno.EFBIG,
                f"a shard takes {used_bytes} bytes of this file system, and {self.reserve_bytes(name.size_bytes)} are "
                "reserved for it",
                name.data,
            )

    def _sync(self, path: str, flags: int) -> None:
        try:
            fd = os.open(path, flags | os.O_CLOEXEC, dir_fd=self._blobs_fd)
        except FileNotFoundError:
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _open_file(self, name: BlobName, file: str, size_bytes: int) -> int:
        path = f"{name.folder}/{file}"
        with disk_trouble("opening a shard", f"blobs/{path}"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._blobs_fd)
            except OSError as error:
                if error.errno in {errno.ENOENT, errno.EIO, errno.ELOOP}:
                    raise BlobGone(f"blobs/{path}: {error.strerror}", error) from error
                raise
            found_bytes = os.fstat(fd).st_size
        if found_bytes != size_bytes:
            os.close(fd)
            raise BlobGone(f"blobs/{path} has {found_bytes} bytes")
        return fd


def _crc32c(fd: int, size_bytes: int) -> int:
    crc32c = 0
    for offset in range(0, size_bytes, _CHECK_BYTES):
        crc32c = google_crc32c.extend(crc32c, os.pread(fd, min(_CHECK_BYTES, size_bytes - offset), offset))
    return int(crc32c)


def _write_file(name: str, content: bytes, folder_fd: int) -> int:
    """Returns the bytes that it takes on disk."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
    try:
        if content:
            os.posix_fallocate(fd, 0, len(content))
        with memoryview(content) as view:
            done = 0
            while done < len(view):
                done += os.pwrite(fd, view[done:], done)
        os.fchmod(fd, 0o440)
        return space.allocated_bytes(os.fstat(fd))
    finally:
        os.close(fd)
