"""The store: everything the daemon does with its cache directory.

Synchronous and safe to call from any thread; a call takes as long as the disk does. Layout::

    cacheloader-cache        marker: the directory is ours
    state                    how the last daemon ended, see ``lifeline``
    lmdb/                    the index, see ``table``; thrown away and rebuilt from names when in doubt
    manifests/DIGEST         see ``manifests``
    blobs/KK/KEY-SIZE-CRC-INDEXSIZE-INDEXCRC.data     a shard, mode 0440
    blobs/KK/KEY-SIZE-CRC-INDEXSIZE-INDEXCRC.index    its sample index, mode 0440
    blobs/KK/.KEY.RANDOM.new                          either, before it is published
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from cacheloader.errors import CacheUnusable
from cacheloader.quantity import format_size
from cacheloader_daemon.store import space
from cacheloader_daemon.store.barrier import BarrierThread
from cacheloader_daemon.store.blobs import BlobGone
from cacheloader_daemon.store.directory import claim
from cacheloader_daemon.store.folders import ensure_folder, names_in
from cacheloader_daemon.store.incoming import Incoming
from cacheloader_daemon.store.lifeline import Phase, Record
from cacheloader_daemon.store.names import is_folder
from cacheloader_daemon.store.opening import Opened, open_parts
from cacheloader_daemon.store.records import LeasedFiles, Resident, StoreStatistics
from cacheloader_daemon.store.table import Row
from cacheloader_daemon.store.trouble import BlobLost, DiskTrouble, disk_trouble

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from typing_extensions import Buffer

    from cacheloader_daemon.store.names import BlobName

log = logging.getLogger(__name__)

HEADROOM_BYTES = 2 * 2**20
"""By how much the overhead is overstated: what the index may grow before somebody asks again. Its transactions change
64 rows at most and copy as many pages."""

MAX_TOUCHES = 4096
"""Access times kept in memory before they are written."""


class Store:
    """One open cache directory. Made by ``open``; the caller has to keep other daemons out by a lock.

    Args:
        directory: The cache directory.
        fds: Descriptors of it, of ``blobs`` and of ``manifests``; owned by this object.
        parts: What was recovered.
    """

    def __init__(self, directory: Path, fds: tuple[int, ...], parts: Opened) -> None:
        self._directory = directory
        self._fds = fds
        self._parts = parts
        self._table = parts.table
        self._files = parts.files
        self._guard = threading.Lock()
        self._publishing = threading.Lock()
        self._verifying: dict[bytes, threading.Lock] = {}
        self._flushing = threading.Lock()
        self._suspects = {key for key, row in parts.rows.items() if row.suspect}
        self._unflushed: dict[bytes, BlobName] = {row.name.key: row.name for row in parts.unflushed}
        self._touched: dict[bytes, int] = {}
        self._barrier_ns = parts.barrier_ns
        self._last_stamp_ns = max([parts.barrier_ns, *(row.accessed_ns for row in parts.rows.values())])
        self._used = {key: row.used_bytes for key, row in parts.rows.items()}
        self._committed = self._evicted = self._lost = 0
        self._is_closed = False
        self._barrier = BarrierThread(self.sync)
        if self._unflushed:
            self._barrier.changed()

    @classmethod
    def open(cls, directory: Path, *, quota_bytes: int) -> Self:
        """Open the cache in ``directory``, which is made if it is missing.

        Blobs of an earlier daemon are there again; what it left half done is removed. Takes a few seconds for
        100,000 blobs.

        Args:
            directory: A directory on a local disk.
            quota_bytes: What the cache may hold; only compared with the disk here, the planner keeps it.

        Raises:
            CacheUnusable: The directory cannot be used; the text says why and what to do.
        """
        fds = [claim(directory)]
        try:
            for name in ("blobs", "manifests"):
                fds.append(ensure_folder(name, dir_fd=fds[0]))
            parts = open_parts(directory, dir_fd=fds[0], blobs_fd=fds[1], manifests_fd=fds[2])
            store = cls(directory, tuple(fds), parts)
            store._warn_of_small_disk(quota_bytes)
        except OSError as error:
            _close_all(fds)
            raise CacheUnusable(
                f"the cache directory {directory} cannot be used: {error.strerror or error}; free some space, mend its "
                "permissions, or name another directory on a local disk (cache_dir)",
                uri=str(directory),
            ) from error
        except BaseException:
            _close_all(fds)
            raise
        return store

    def resident(self) -> list[Resident]:
        """All blobs, the one used longest ago first."""
        self._write_touches()
        rows = sorted(self._table.rows().values(), key=lambda row: row.accessed_ns)
        return [Resident(key=row.name.key, size_bytes=row.name.size_bytes, used_bytes=row.used_bytes) for row in rows]

    def reserve_bytes(self, size_bytes: int) -> int:
        """Upper bound of what a shard of ``size_bytes`` and its sample index take on this disk."""
        return self._files.reserve_bytes(size_bytes)

    def begin(self, key: bytes, *, size_bytes: int) -> Incoming:
        """Make room for a shard and take its bytes.

        Raises:
            DiskTrouble: There is no space, or the disk is at fault.
        """
        folder_fd = self._files.open_folder(key)
        return Incoming(key, size_bytes=size_bytes, folder_fd=folder_fd, publish=self._publish)

    def is_suspect(self, key: bytes) -> bool:
        """Whether leasing a blob means to read all of it first."""
        return key in self._suspects

    def lease(self, key: bytes) -> LeasedFiles:
        """Open a blob; a suspect one is verified first. Counts as a use of it.

        Raises:
            BlobLost: There is no such blob, or it turned out to be damaged and was removed.
            DiskTrouble: It cannot be opened for another reason, such as too many open files.
        """
        row = self._table.get(key)
        if row is None:
            raise BlobLost(key)
        try:
            if key in self._suspects:
                self._verify(row)
            data_fd, index_fd = self._files.open(row.name)
        except BlobGone as error:
            log.warning("a blob was lost: %s", error)
            self._forget(row, is_lost=True)
            raise BlobLost(key) from error
        self.touch([key])
        return LeasedFiles(
            data_fd=data_fd, index_fd=index_fd, size_bytes=row.name.size_bytes, index_bytes=row.name.index_bytes
        )

    def evict(self, key: bytes) -> int:
        """Unlink a blob; readers that have it open are not disturbed.

        Returns:
            Bytes that it took, measured before; they are free once nobody has it open. 0 if there is no such blob.

        Raises:
            DiskTrouble: The disk refuses; the blob is still there.
        """
        row = self._table.get(key)
        return 0 if row is None else self._forget(row, is_lost=False)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that blobs are used now; written later, many at a time."""
        with self._guard:
            for key in keys:
                self._touched[key] = self._next_stamp()
            is_many = len(self._touched) >= MAX_TOUCHES
        if is_many:
            self._write_touches()
        self._barrier.changed()

    def remember_samples(self, key: bytes, num_samples: int) -> None:
        """Keep the sample count of a shard, beyond its eviction; a disk that does not take it is logged."""
        try:
            self._table.remember_samples(key, num_samples)
        except DiskTrouble as error:
            # Counting again costs a scan; a shard that could be served costs the job.
            log.warning("a sample count could not be kept: %s", error)
        self._barrier.changed()

    def samples(self, key: bytes) -> int | None:
        """The sample count of a shard, ``None`` if it is not remembered."""
        return self._table.samples(key)

    def put_manifest(self, digest: str, block: Buffer) -> None:
        """Keep a manifest under its digest; the 64 used last are kept.

        Raises:
            DiskTrouble: The disk does not take it.
        """
        self._parts.manifests.put(digest, block)

    def open_manifest(self, digest: str) -> int | None:
        """A fresh read-only descriptor of a manifest, owned by the caller; ``None`` if it is not there."""
        return self._parts.manifests.open(digest)

    def overhead_bytes(self) -> int:
        """What the directory takes besides blobs and downloads (index, manifests, log, folders), and some headroom."""
        with disk_trouble("measuring the cache", str(self._directory)):
            dir_fd, blobs_fd, _ = self._fds
            total = space.allocated_bytes(os.fstat(dir_fd)) + space.allocated_bytes(os.fstat(blobs_fd))
            names = names_in(".", dir_fd=dir_fd)
            total += sum(space.tree_bytes(name, dir_fd=dir_fd) for name in names if name != "blobs")
            with os.scandir(blobs_fd) as folders:
                total += sum(
                    space.allocated_bytes(folder.stat(follow_symlinks=False))
                    for folder in folders
                    if is_folder(folder.name)
                )
        return total + self._parts.foreign_bytes + HEADROOM_BYTES

    def sync(self) -> None:
        """Bring everything to the disk: what is published up to now survives a power failure.

        Raises:
            DiskTrouble: The disk refuses.
        """
        with self._flushing:
            self._write_touches()
            # Not between a blob's stamp and its name: it could not be found here, and would count as flushed.
            with self._publishing, self._guard:
                unflushed, self._unflushed = self._unflushed, {}
                stamp_ns, doubtful = self._last_stamp_ns, bool(self._suspects)
            try:
                self._files.flush(unflushed.values())
                self._table.sync()
                self._note(Phase.RUNNING, stamp_ns, doubtful=doubtful)
            except OSError:
                with self._guard:
                    self._unflushed = {**unflushed, **self._unflushed}
                raise

    def statistics(self) -> StoreStatistics:
        """Numbers for people and for metrics."""
        with self._guard:
            return StoreStatistics(
                blobs=len(self._used),
                used_bytes=sum(self._used.values()),
                suspect_blobs=len(self._suspects),
                foreign_bytes=self._parts.foreign_bytes,
                committed=self._committed,
                evicted=self._evicted,
                lost=self._lost,
            )

    def close(self) -> None:
        """Bring everything to the disk and note a clean end; calling it again does nothing.

        Downloads have to be over. A disk that refuses is logged: the next start then recovers as after a crash.
        """
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
        self._barrier.stop()
        try:
            self.sync()
            self._table.close()
            self._note(Phase.CLOSED, self._barrier_ns, doubtful=bool(self._suspects))
        except OSError as error:
            log.warning("the cache %s could not be closed cleanly: %s", self._directory, error)
            self._table.close()
        _close_all(self._fds)

    def _publish(self, incoming: Incoming, index: bytes, crc32c: int) -> int:
        old = self._table.get(incoming.key)
        name, used_bytes = self._files.stage(incoming, index, crc32c)
        try:
            with self._publishing:
                with self._guard:
                    stamp_ns = self._next_stamp()
                self._files.publish(incoming, name, stamp_ns)
                with self._guard:
                    self._unflushed[name.key] = name
            self._table.put([Row(name=name, used_bytes=used_bytes, accessed_ns=stamp_ns)])
        except DiskTrouble:
            self._files.remove(name)
            raise
        if old is not None and old.name != name:
            # The origin gave other bytes for one version. Readers of the old ones keep them.
            self._files.remove(old.name)
        with self._guard:
            self._suspects.discard(name.key)
            self._used[name.key] = used_bytes
            self._committed += 1
        self._barrier.changed()
        return used_bytes

    def _verify(self, row: Row) -> None:
        key = row.name.key
        with self._guard:
            # One lock a blob: to sum one up takes seconds, and nobody shall wait for another's.
            lock = self._verifying.setdefault(key, threading.Lock())
        try:
            with lock:
                if key not in self._suspects:
                    return
                self._files.verify(row.name)
                with self._guard:
                    self._suspects.discard(key)
        finally:
            with self._guard:
                self._verifying.pop(key, None)
        try:
            self._table.put([replace(row, suspect=False)])
        except DiskTrouble as error:
            log.warning("a blob was verified, and will be again after the next start: %s", error)

    def _forget(self, row: Row, *, is_lost: bool) -> int:
        key = row.name.key
        freed_bytes = self._files.remove(row.name)
        try:
            self._table.delete([key])
        except DiskTrouble as error:
            log.warning("a blob is gone and its row in the index is not; the next start removes it: %s", error)
        with self._guard:
            was_there = self._used.pop(key, None) is not None
            self._suspects.discard(key)
            self._unflushed.pop(key, None)
            self._touched.pop(key, None)
            self._lost += was_there and is_lost
            self._evicted += was_there and not is_lost
        self._barrier.changed()
        return freed_bytes

    def _next_stamp(self) -> int:
        """A time stamp above all earlier ones, whatever the clock does; the guard is held."""
        self._last_stamp_ns = max(time.time_ns(), self._last_stamp_ns + 1)
        return self._last_stamp_ns

    def _write_touches(self) -> None:
        with self._guard:
            touched, self._touched = self._touched, {}
        try:
            self._table.touch(touched)
        except DiskTrouble as error:
            log.warning("times of use could not be written: %s", error)

    def _note(self, phase: Phase, barrier_ns: int, *, doubtful: bool) -> None:
        with disk_trouble("noting the state of the cache", str(self._directory)):
            self._parts.lifeline.write(
                Record(boot_id=self._parts.boot_id, phase=phase, barrier_ns=barrier_ns, doubtful=doubtful)
            )
        self._barrier_ns = barrier_ns

    def _warn_of_small_disk(self, quota_bytes: int) -> None:
        disk = os.fstatvfs(self._fds[1])
        room_bytes = disk.f_bavail * disk.f_frsize + sum(self._used.values())
        if room_bytes < quota_bytes:
            log.warning(
                "the cache may hold %s and its disk has room for %s; what does not fit is served from memory",
                format_size(quota_bytes), format_size(room_bytes),
            )  # fmt: skip


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
