"""Damaged blobs, kept for whoever wants to know what happened to them: the newest few, within a bound."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from cacheloader_daemon.store.folders import names_in, unlink_if_there
from cacheloader_daemon.store.names import BlobName, folder_of
from cacheloader_daemon.store.space import allocated_bytes

log = logging.getLogger(__name__)

MAX_BLOBS = 4
MAX_BYTES = 2**30
"""A blob that would exceed this alone is removed and not kept."""


class Quarantine:
    """The directory ``quarantine``; its bytes count against the quota. Safe to call from any thread.

    Args:
        folder_fd: The directory; stays open while this is used.
        blobs_fd: The directory ``blobs``.
        max_bytes: What it may hold.
    """

    def __init__(self, folder_fd: int, blobs_fd: int, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder_fd = folder_fd
        self._blobs_fd = blobs_fd
        self._max_bytes = max_bytes
        self._guard = threading.Lock()
        self._kept = self._found()

    @property
    def num_blobs(self) -> int:
        """Blobs that are kept."""
        return len(self._kept)

    @property
    def used_bytes(self) -> int:
        """What they take on disk."""
        return sum(self._kept.values())

    def take(self, name: BlobName, used_bytes: int) -> bool:
        """Move a blob here; ``False``, and it is where it was, if it is too large or the disk does not do it."""
        with self._guard:
            if used_bytes > self._max_bytes:
                return False
            while self._kept and (len(self._kept) >= MAX_BLOBS or self.used_bytes + used_bytes > self._max_bytes):
                self._remove(next(iter(self._kept)))
            self._remove(name)
            try:
                for file in (name.data, name.index):
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(f"{name.folder}/{file}", file, src_dir_fd=self._blobs_fd, dst_dir_fd=self._folder_fd)
            except OSError as error:
                log.warning("damaged blob %s could not be set aside: %s", name.data, error)
                return False
            self._kept[name] = used_bytes
            return True

    def _found(self) -> dict[BlobName, int]:
        """What earlier daemons kept, the oldest first; other files are left alone."""
        found: dict[BlobName, int] = {}
        stamps: dict[BlobName, int] = {}
        for file in names_in(".", dir_fd=self._folder_fd):
            parsed = BlobName.parse(file, folder=file[:2])
            if parsed is None or folder_of(parsed[0].key) != file[:2]:
                continue
            status = os.stat(file, dir_fd=self._folder_fd, follow_symlinks=False)
            found[parsed[0]] = found.get(parsed[0], 0) + allocated_bytes(status)
            stamps[parsed[0]] = max(stamps.get(parsed[0], 0), status.st_ctime_ns)
        return {name: found[name] for name in sorted(found, key=stamps.__getitem__)}

    def _remove(self, name: BlobName) -> None:
        self._kept.pop(name, None)
        for file in (name.data, name.index):
            with contextlib.suppress(OSError):
                unlink_if_there(file, dir_fd=self._folder_fd)
