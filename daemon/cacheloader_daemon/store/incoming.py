"""A shard on its way in: a temporary file with all blocks allocated, written by many threads, published at the end."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from cacheloader_daemon.store.names import folder_of, temporary_name
from cacheloader_daemon.store.trouble import DiskTrouble, disk_trouble

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer


class Incoming:
    """One download. Ends with ``commit`` or ``abort``; the file of a daemon that died is removed at the next start.

    Args:
        key: The shard.
        size_bytes: Its length.
        folder_fd: The directory of its blob; owned by this object from now on.
        publish: Makes a blob of the finished file; returns its bytes on disk.
        ended: Called with ``size_bytes`` once the file no longer takes space as a download.
        troubled: Called with each error that the disk gives.

    Raises:
        DiskTrouble: There is no space, or the file cannot be made.
    """

    def __init__(
        self,
        key: bytes,
        *,
        size_bytes: int,
        folder_fd: int,
        publish: Callable[[Incoming, bytes, int], int],
        ended: Callable[[int], None],
        troubled: Callable[[OSError], None],
    ) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.folder_fd = folder_fd
        self.temporary = temporary_name(key)
        self._path = f"blobs/{folder_of(key)}/{self.temporary}"
        self._publish = publish
        self._ended = ended
        self._troubled = troubled
        self._has_begun = False
        self._guard = threading.Lock()
        self._num_writers = 0
        self._written_bytes = 0
        self._is_over = False
        self._fd = -1
        try:
            with disk_trouble("allocating a shard", self._path):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._fd = os.open(self.temporary, flags, 0o600, dir_fd=folder_fd)
                if size_bytes:
                    # The quota counts these blocks from here on, and a full disk says so now.
                    os.posix_fallocate(self._fd, 0, size_bytes)
            self._has_begun = True
        except BaseException:
            self.abort()
            raise

    @property
    def fd(self) -> int:
        """Descriptor of the file, for reading and writing until ``commit`` or ``abort`` begins."""
        return self._fd

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at ``offset`` bytes. Safe to call from many threads.

        Raises:
            DiskTrouble: The disk does not take it.
            ValueError: The download is over, or the bytes lie outside the shard.
        """
        with memoryview(data).cast("B") as view:
            if offset < 0 or offset + len(view) > self.size_bytes:
                raise ValueError(f"bytes [{offset}, {offset + len(view)}) of a shard of {self.size_bytes} bytes")
            with self._guard:
                if self._is_over:
                    raise ValueError(f"the download of shard {self.key.hex()} is over")
                self._num_writers += 1
            try:
                with disk_trouble("writing a shard", self._path):
                    done = 0
                    while done < len(view):
                        done += os.pwrite(self._fd, view[done:], offset + done)
                with self._guard:
                    self._written_bytes += len(view)
            except DiskTrouble as trouble:
                self._troubled(trouble)
                raise
            finally:
                with self._guard:
                    self._num_writers -= 1
                    is_last = self._is_over and not self._num_writers
                if is_last:
                    self._close()

    def commit(self, index: bytes, crc32c: int) -> int:
        """Make a blob of the file.

        Args:
            index: The sample index.
            crc32c: Checksum of the shard's bytes.

        Returns:
            Bytes that the blob takes on disk.

        Raises:
            DiskTrouble: The disk does not take it, or the index is longer than what is reserved for it. The download
                has been aborted.
            ValueError: The download is over, not all bytes are written, or a write is still going on.
        """
        with self._guard:
            if self._is_over or self._num_writers or self._written_bytes < self.size_bytes:
                raise ValueError(
                    f"shard {self.key.hex()} cannot be committed: {self._written_bytes} of {self.size_bytes} bytes are "
                    f"written, {self._num_writers} writes go on, the download is{'' if self._is_over else ' not'} over"
                )
        try:
            used_bytes = self._publish(self, index, crc32c)
        except BaseException as error:
            if isinstance(error, DiskTrouble):
                self._troubled(error)
            self.abort()
            raise
        with self._guard:
            self._is_over = True
        self._close()
        return used_bytes

    def abort(self) -> None:
        """Remove the file; calling it again, or after ``commit``, does nothing."""
        with self._guard:
            if self._is_over:
                return
            self._is_over = True
            may_close = not self._num_writers
        try:
            os.unlink(self.temporary, dir_fd=self.folder_fd)
        except OSError as error:
            # Gone already, or the disk is at fault: then the next start removes it.
            if error.errno not in {errno.ENOENT, errno.EROFS, errno.EIO}:
                raise DiskTrouble(error.errno or errno.EIO, "removing a partial shard", self._path) from error
        finally:
            # A descriptor closed under a writer could be somebody else's file by the time the writer uses it.
            if may_close:
                self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        os.close(self.folder_fd)
        if self._has_begun:
            self._ended(self.size_bytes)
