"""One cache directory: everything that is done with it.

Synchronous and safe to call from any thread; a call takes as long as the disk does. Layout::

    cacheloader-cache        marker: the directory is ours
    state                    how the last daemon ended, see ``lifeline``
    lmdb/                    the index, see ``table``; thrown away and rebuilt from names when in doubt
    manifests/DIGEST         see ``manifests``
    blobs/KK/KEY-SIZE-CRC-INDEXSIZE-INDEXCRC.data     a shard, mode 0440
    blobs/KK/KEY-SIZE-CRC-INDEXSIZE-INDEXCRC.index    its sample index, mode 0440
    blobs/KK/.KEY.RANDOM.new                          either, before it is published
    quarantine/              blobs that were found damaged, the newest few, see ``quarantine``
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import msgspec

from cacheloader.errors import CacheUnusable
from cacheloader_daemon.store import space
from cacheloader_daemon.store.barrier import BarrierThread
from cacheloader_daemon.store.blobs import BlobGone
from cacheloader_daemon.store.directory import claim
from cacheloader_daemon.store.flushing import MAX_UNWRITTEN, Flushing
from cacheloader_daemon.store.folders import ensure_folder, names_in
from cacheloader_daemon.store.incoming import Incoming
from cacheloader_daemon.store.names import is_folder
from cacheloader_daemon.store.opening import Folders, Opened, open_parts
from cacheloader_daemon.store.records import LeasedFiles, StoreStatistics
from cacheloader_daemon.store.row import Row
from cacheloader_daemon.store.trouble import BlobLost, DiskTrouble, disk_trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from typing_extensions import Buffer

    from cacheloader_daemon.store.records import Resident

log = logging.getLogger(__name__)

HEADROOM_BYTES = 2 * 2**20
"""By how much the overhead is overstated: what the index may grow before somebody asks again. Its transactions change
64 rows at most and copy as many pages."""


class Store:
    """One open cache directory. Made by ``open``; the caller has to keep other daemons out by a lock.

    Args:
        directory: The cache directory.
        folders: It and its parts, open; owned by this object.
        parts: What was recovered.
    """

    def __init__(self, directory: Path, folders: Folders, parts: Opened) -> None:
        self.directory = directory
        self._folders = folders
        self._parts = parts
        self._table = parts.table
        self._files = parts.files
        self._residents = parts.residents
        self._doubts = parts.doubts
        self._flushing = Flushing(parts, str(directory))
        self._guard = threading.Lock()
        self._on_trouble: Callable[[OSError], None] = lambda _: None
        self._incoming_bytes = 0
        self._stuck_bytes = 0
        self._committed = self._evicted = self._lost = self._damaged = 0
        self._is_closed = False
        self._barrier = BarrierThread(self.sync)
        if self._flushing.num_unflushed:
            self._barrier.changed()

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open the cache in ``directory``, which is made if it is missing.

        Blobs of an earlier daemon are there again; what it left half done is removed. Takes about a second for 100,000
        blobs, also when their index has to be rebuilt: names are read and no file is.

        Raises:
            CacheUnusable: The directory cannot be used; the text says why and what to do.
        """
        fds = [claim(directory)]
        try:
            for name in ("blobs", "manifests", "quarantine"):
                fds.append(ensure_folder(name, dir_fd=fds[0]))
            folders = Folders(root=fds[0], blobs=fds[1], manifests=fds[2], quarantine=fds[3])
            return cls(directory, folders, open_parts(directory, folders))
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

    @property
    def folders(self) -> Folders:
        """Descriptors of the directory and its parts, open until ``close``."""
        return self._folders

    def watch(self, on_trouble: Callable[[OSError], None]) -> None:
        """From now on call ``on_trouble``, from any thread, with each error that the directory gives."""
        self._on_trouble = on_trouble

    def __contains__(self, key: bytes) -> bool:
        return key in self._residents

    def all_keys(self) -> list[bytes]:
        """The keys of all blobs."""
        return self._residents.all_keys()

    def resident(self) -> list[Resident]:
        """All blobs, the one used longest ago first; those whose last use is not known come before all others."""
        return self._residents.in_order()

    def reserve_bytes(self, size_bytes: int) -> int:
        """Upper bound of what a shard of ``size_bytes`` and its sample index take on this disk."""
        return self._files.reserve_bytes(size_bytes)

    def begin(self, key: bytes, *, size_bytes: int) -> Incoming:
        """Make room for a shard and take its bytes.

        Raises:
            DiskTrouble: There is no space, or the disk is at fault.
        """
        with self._watched():
            incoming = Incoming(
                key,
                size_bytes=size_bytes,
                folder_fd=self._files.open_folder(key),
                publish=self._publish,
                ended=self._incoming_ended,
                troubled=self._on_trouble,
            )
        with self._guard:
            self._incoming_bytes += size_bytes
        return incoming

    def is_slow(self, key: bytes) -> bool:
        """Whether leasing a blob may mean to read all of it first."""
        return key in self._doubts

    def lease(self, key: bytes, *, verify: bool = False) -> LeasedFiles:
        """Open a blob; a suspect one is verified first. Counts as a use of it.

        Args:
            key: The blob.
            verify: Whether it is compared with its checksums although nothing is said against it.

        Raises:
            BlobLost: There is no such blob, or it turned out to be damaged and was set aside.
            DiskTrouble: It cannot be opened for another reason, such as too many open files.
        """
        row = self._residents.get(key)
        if row is None:
            raise BlobLost(key)
        with self._watched():
            try:
                if key in self._doubts:
                    self._settle(row)
                elif verify:
                    self._files.verify(row.name)
                data_fd, index_fd = self._files.open(row.name)
            except BlobGone as gone:
                self._give_up(row, gone)
                raise BlobLost(key) from gone
        self.touch([key])
        return LeasedFiles(
            data_fd=data_fd, index_fd=index_fd, size_bytes=row.name.size_bytes, index_bytes=row.name.index_bytes
        )

    def evict(self, key: bytes) -> int:
        """Unlink a blob; readers that have it open are not disturbed.

        Returns:
            Bytes that it took, measured before; they are free once nobody has it open. 0 if there is no such blob.

        Raises:
            DiskTrouble: The disk refuses. Its files stay, count as overhead, and are a blob again after the next start.
        """
        row = self._residents.get(key)
        if row is None:
            return 0
        try:
            with self._watched():
                freed_bytes = self._files.remove(row.name)
        except DiskTrouble:
            # The planner goes on as if it were gone, so that a disk that cannot unlink does not stop it.
            if self._forget(key):
                with self._guard:
                    self._stuck_bytes += row.used_bytes
            raise
        if self._forget(key):
            with self._guard:
                self._evicted += 1
        return freed_bytes

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that blobs are used now; written later, many at a time."""
        self._residents.touch(keys)
        if self._residents.num_changed >= MAX_UNWRITTEN:
            self._flushing.write_rows()
        self._barrier.changed()

    def remember_samples(self, key: bytes, num_samples: int) -> bool:
        """Keep the sample count of a shard, beyond its eviction; whether the disk takes it."""
        try:
            self._table.remember_samples(key, num_samples)
        except DiskTrouble as error:
            # Counting again costs a scan; a shard that could be served costs the job.
            log.warning("a sample count could not be kept: %s", error)
            return False
        self._barrier.changed()
        return True

    def samples(self, key: bytes) -> int | None:
        """The sample count of a shard, ``None`` if it is not remembered.

        Raises:
            DiskTrouble: The index cannot be read.
        """
        return self._table.samples(key)

    def put_manifest(self, digest: str, block: Buffer) -> None:
        """Keep a manifest under its digest; the 64 used last are kept.

        Raises:
            DiskTrouble: The disk does not take it.
        """
        with self._watched():
            self._parts.manifests.put(digest, block)

    def open_manifest(self, digest: str) -> int | None:
        """A fresh read-only descriptor of a manifest, owned by the caller; ``None`` if it is not there.

        Raises:
            DiskTrouble: It cannot be opened.
        """
        return self._parts.manifests.open(digest)

    @property
    def occupied_bytes(self) -> int:
        """What blobs and downloads take on disk now, at most; without what ``overhead_bytes`` measures."""
        return self._residents.used_bytes + self._incoming_bytes + self.leftover_bytes

    @property
    def leftover_bytes(self) -> int:
        """Of that: damaged blobs that are kept, and files that the disk did not let us unlink."""
        return self._parts.quarantine.used_bytes + self._stuck_bytes

    def overhead_bytes(self) -> int:
        """What the directory takes besides blobs, downloads and leftovers, and some headroom.

        That is index, manifests, log and folders.

        Raises:
            DiskTrouble: It cannot be measured.
        """
        with disk_trouble("measuring the cache", str(self.directory)):
            root, blobs = self._folders.root, self._folders.blobs
            total = sum(space.allocated_bytes(os.fstat(fd)) for fd in (root, blobs, self._folders.quarantine))
            names = names_in(".", dir_fd=root)
            total += sum(space.tree_bytes(name, dir_fd=root) for name in names if name not in {"blobs", "quarantine"})
            with os.scandir(blobs) as found:
                total += sum(
                    space.allocated_bytes(folder.stat(follow_symlinks=False))
                    for folder in found
                    if is_folder(folder.name)
                )
        return total + self._parts.foreign_bytes + HEADROOM_BYTES

    def verify(self, key: bytes, sum_up: Callable[[int, int], int]) -> bool:
        """Compare a blob with its checksums; a damaged one is set aside.

        Args:
            key: The blob.
            sum_up: Gives the CRC32C of an open file of a length.

        Returns:
            Whether it is there and sound.

        Raises:
            DiskTrouble: It cannot be looked at.
        """
        row = self._residents.get(key)
        if row is None:
            return False
        with self._watched():
            try:
                self._files.verify(row.name, sum_up)
            except BlobGone as gone:
                if key in self._residents:  # else it was evicted meanwhile
                    self._give_up(row, gone)
                return False
        return True

    def probe(self) -> None:
        """Try whether the directory takes anything: a file is made, brought to the disk and removed.

        Raises:
            DiskTrouble: It does not.
        """
        with disk_trouble("trying the cache directory", str(self.directory)):
            self._files.probe()

    def abandon(self) -> list[bytes]:
        """The directory is gone: know none of its blobs any more; returns their keys."""
        return [key for key in self._residents.all_keys() if self._forget(key)]

    def sync(self) -> None:
        """Bring everything to the disk: what is published up to now survives a power failure.

        Raises:
            DiskTrouble: The disk refuses.
        """
        with self._watched():
            self._flushing.flush()

    def statistics(self) -> StoreStatistics:
        """Numbers for people and for metrics."""
        quarantine = self._parts.quarantine
        with self._guard:
            return StoreStatistics(
                blobs=len(self._residents),
                used_bytes=self._residents.used_bytes,
                suspect_blobs=len(self._doubts),
                foreign_bytes=self._parts.foreign_bytes,
                committed=self._committed,
                evicted=self._evicted,
                lost=self._lost,
                damaged=self._damaged,
                quarantined_blobs=quarantine.num_blobs,
                quarantined_bytes=quarantine.used_bytes,
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
            self._flushing.close()
        except OSError as error:
            log.warning("the cache %s could not be closed cleanly: %s", self.directory, error)
        folders = self._folders
        _close_all((folders.root, folders.blobs, folders.manifests, folders.quarantine))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except DiskTrouble as trouble:
            self._on_trouble(trouble)
            raise

    def _publish(self, incoming: Incoming, index: bytes, crc32c: int) -> int:
        old = self._residents.get(incoming.key)
        name, used_bytes = self._files.stage(incoming, index, crc32c)
        try:
            stamp_ns = self._flushing.publish(name, lambda stamp_ns: self._files.publish(incoming, name, stamp_ns))
        except DiskTrouble:
            self._files.remove(name)
            raise
        self._residents.put(Row(name=name, used_bytes=used_bytes, accessed_ns=stamp_ns))
        self._doubts.drop(name.key)
        with self._guard:
            self._committed += 1
        if old is not None and old.name != name:
            # The origin gave other bytes for one version. Readers of the old ones keep them.
            self._files.remove(old.name)
        if self._residents.num_changed >= MAX_UNWRITTEN:
            self._flushing.write_rows()
        self._barrier.changed()
        return used_bytes

    def _incoming_ended(self, size_bytes: int) -> None:
        with self._guard:
            self._incoming_bytes -= size_bytes

    def _settle(self, row: Row) -> None:
        def prove() -> None:
            if self._files.stamp_ns(row.name) > self._doubts.proven_ns:
                self._files.verify(row.name)

        if self._doubts.settle(row.name.key, prove):
            self._residents.put(msgspec.structs.replace(row, suspect=False))

    def _give_up(self, row: Row, gone: BlobGone) -> None:
        """A blob is missing or damaged: keep what is left of it for inspection, and know it no more."""
        log.warning("a blob was lost: %s", gone)
        key = row.name.key
        if gone.error is not None:
            self._on_trouble(gone.error)
        is_kept = not gone.is_missing and self._parts.quarantine.take(row.name, row.used_bytes)
        if not is_kept:
            try:
                self._files.remove(row.name)
            except DiskTrouble as error:
                log.warning("what is left of a lost blob cannot be removed; the next start meets it again: %s", error)
        if self._forget(key):
            with self._guard:
                self._lost += 1
                self._damaged += not gone.is_missing

    def _forget(self, key: bytes) -> bool:
        was_there = self._residents.remove(key)
        self._doubts.drop(key)
        self._flushing.forget(key)
        self._barrier.changed()
        return was_there


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
