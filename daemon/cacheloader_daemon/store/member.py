"""One directory of a pool: its store, its share of the pool's bytes, and how it is."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from cacheloader_daemon.room import Disk, Floors, look_at_disk
from cacheloader_daemon.store.health import Condition, Health
from cacheloader_daemon.store.trouble import BlobLost, DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader_daemon.store.records import StoreStatistics
    from cacheloader_daemon.store.store import Store

log = logging.getLogger(__name__)


class DirectoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A cache directory at one moment.

    Attributes:
        directory: Its path.
        condition: What it does: ``"well"``, ``"read-only"``, ``"failing"``, ``"gone"``, or ``"unusable"`` since the
            start.
        cause: Why, if it is not well.
        share_bytes: What the pool would put there.
        limit_bytes: What it may hold now: less if others have filled its disk or it takes no shards.
        store: What it holds; ``None`` if it was unusable from the start.
    """

    directory: str
    condition: str
    cause: str
    share_bytes: int
    limit_bytes: int
    store: StoreStatistics | None


class Member:
    """Safe to call from any thread.

    Args:
        store: The open directory; owned by this object.
        floors: What is left free for others.
        lost: Called with the keys of blobs that are gone all at once.
    """

    def __init__(self, store: Store, floors: Floors, *, lost: Callable[[list[bytes]], None]) -> None:
        self.store = store
        self.health = Health()
        self.share_bytes = 0
        self.limit_bytes = 0
        self._floors = floors
        self._lost = lost
        self._guard = threading.Lock()
        self._overhead_bytes = store.overhead_bytes()
        store.watch(self.failed)

    @property
    def own_bytes(self) -> int:
        """What the directory takes on its disk, at most."""
        return self.store.occupied_bytes + self._overhead_bytes

    @property
    def overhead_bytes(self) -> int:
        """Of that: what is neither blob, download nor leftover, as it was measured last."""
        return self._overhead_bytes if self.health.serves else 0

    def look(self) -> Disk | None:
        """Its disk now, ``None`` if that does not answer."""
        try:
            return look_at_disk(self.store.folders.blobs, self._floors)
        except OSError as error:
            self.failed(error)
            return None

    def measure(self) -> None:
        """Measure the overhead anew, and try a directory again whose rest is over."""
        now_s = time.monotonic()
        if self.health.is_due(now_s):
            self._try_again(now_s)
        if not self.health.serves:
            return
        try:
            self._overhead_bytes = self.store.overhead_bytes()
        except DiskTrouble as error:
            log.warning("the cache directory %s cannot be measured: %s", self.store.directory, error)
            self.failed(error)

    def bound(self, spare_bytes: int, *, has_inodes: bool) -> int:
        """Set and return what it may hold, of which ``spare_bytes`` are free on its disk for it to take."""
        if not self.health.serves:
            self.limit_bytes = 0
        elif not self.health.takes or not has_inodes:
            self.limit_bytes = min(self.share_bytes, self.own_bytes)
        else:
            self.limit_bytes = max(0, min(self.share_bytes, self.own_bytes + spare_bytes))
        return self.limit_bytes

    def refuse(self, need_bytes: int) -> None:
        """Check that a download of ``need_bytes`` leaves the floor free.

        Raises:
            DiskTrouble: It does not, or the directory takes no shards.
        """
        path = str(self.store.directory)
        if not self.health.takes:
            raise DiskTrouble(errno.EIO, f"the directory is {self.health.condition.value}: {self.health.cause}", path)
        disk = self.look()
        if disk is not None and disk.spare_bytes < need_bytes:
            raise DiskTrouble(
                errno.ENOSPC,
                f"{need_bytes} bytes are needed, and its disk has {disk.spare_bytes} above what shall stay free",
                path,
            )

    def failed(self, error: OSError) -> None:
        """Take note of an error that the directory gave."""
        now_s = time.monotonic()
        is_missing = isinstance(error, BlobLost) or error.errno == errno.ENOENT
        with self._guard:
            is_news = self.health.lost(now_s) if is_missing and self._is_removed() else self.health.failed(error, now_s)
            gone = is_news and self.health.condition is Condition.GONE
        if is_news:
            log.error(
                "the cache directory %s is %s (%s); %s", self.store.directory, self.health.condition.value,
                self.health.cause, "what it held is fetched again" if gone else "it takes no more shards",
            )  # fmt: skip
        if gone:
            self._lost(self.store.abandon())

    def status(self) -> DirectoryStatus:
        """For people."""
        return DirectoryStatus(
            directory=str(self.store.directory),
            condition=self.health.condition.value,
            cause=self.health.cause,
            share_bytes=self.share_bytes,
            limit_bytes=self.limit_bytes,
            store=self.store.statistics(),
        )

    def _is_removed(self) -> bool:
        folders = self.store.folders
        try:
            return not all(os.fstat(fd).st_nlink for fd in (folders.root, folders.blobs))
        except OSError:
            return True

    def _try_again(self, now_s: float) -> None:
        try:
            self.store.probe()
        except OSError as error:
            self.health.tried(works=False, now_s=now_s)
            log.warning("the cache directory %s takes no shards yet: %s", self.store.directory, error)
        else:
            self.health.tried(works=True, now_s=now_s)
            log.warning("the cache directory %s takes shards again", self.store.directory)
