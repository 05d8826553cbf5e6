"""Reading every blob again now and then, slowly, to find what a disk has spoilt since it was written."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING

import google_crc32c

from cacheloader.quantity import format_size
from cacheloader_daemon.store.trouble import DiskTrouble

if TYPE_CHECKING:
    from cacheloader_daemon.store.pool import Pool

log = logging.getLogger(__name__)

_BLOCK_BYTES = 2**20
_NICEST = 19


class _Stopped(Exception):
    pass


class Scrubber:
    """A thread of the lowest priority that compares one blob after the other with its checksums.

    It reads past the page cache where the file system allows it: what is on the disk is what counts, and what others
    have in memory stays there. Blobs take their turn by key, each once in ``interval_s``, and the clock says whose turn
    it is, so that restarts do not begin at the front again.

    Args:
        pool: The blobs.
        interval_s: Time in which every blob is read once.
        max_bytes_per_s: Rate of reading one blob.
    """

    def __init__(self, pool: Pool, *, interval_s: float, max_bytes_per_s: int) -> None:
        self.num_blobs = 0
        self.num_bytes = 0
        self._pool = pool
        self._interval_s = interval_s
        self._max_bytes_per_s = max_bytes_per_s
        self._stopping = threading.Event()
        self._buffer = mmap.mmap(-1, _BLOCK_BYTES)  # aligned to a page, as reads past the page cache have to be
        self._thread = threading.Thread(target=self._run, name="store-scrub", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after a read that is under way; calling it again does nothing."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICEST)
        try:
            while True:
                self._round()
        except _Stopped:
            return

    def _round(self) -> None:
        """One pass, or the rest of the one that the clock says is going on."""
        begun_s = time.time()
        keys = sorted(self._pool.all_keys())
        first = int(begun_s % self._interval_s / self._interval_s * len(keys))
        pause_s = self._interval_s / max(1, len(keys))
        num_damaged = 0
        for number, key in enumerate(keys[first:]):
            self._rest_until(begun_s + number * pause_s)
            num_damaged += not self._check(key)
        if keys:
            log.info("%d blobs were read again (%s since the start), %d of them are damaged or gone",
                     len(keys) - first, format_size(self.num_bytes), num_damaged)  # fmt: skip
        self._rest_until(begun_s + max(1, len(keys) - first) * pause_s)

    def _check(self, key: bytes) -> bool:
        try:
            is_sound = self._pool.verify(key, self._sum_up)
        except DiskTrouble as error:
            log.warning("blob %s could not be read again: %s", key.hex(), error)
            return True
        self.num_blobs += 1
        return is_sound or key in self._pool

    def _sum_up(self, fd: int, size_bytes: int) -> int:
        """CRC32C of a file, read at the rate that is allowed."""
        with contextlib.suppress(OSError):  # not every file system can
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        crc32c = 0
        offset = 0
        while offset < size_bytes:
            begun_s = time.monotonic()
            num_bytes = os.preadv(fd, [self._buffer], offset)
            if num_bytes <= 0:
                break
            crc32c = google_crc32c.extend(crc32c, self._buffer[: min(num_bytes, size_bytes - offset)])
            offset += num_bytes
            self.num_bytes += num_bytes
            self._rest(begun_s + num_bytes / self._max_bytes_per_s - time.monotonic())
        return int(crc32c)

    def _rest_until(self, time_s: float) -> None:
        self._rest(time_s - time.time())

    def _rest(self, duration_s: float) -> None:
        # A clock that jumps must neither keep it asleep for ever nor make it run without rest.
        if self._stopping.wait(min(max(0.0, duration_s), self._interval_s)):
            raise _Stopped
