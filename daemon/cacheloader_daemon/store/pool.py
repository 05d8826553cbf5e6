"""Several cache directories as one: each on a disk of its own, and each may fail without the others."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from cacheloader.quantity import format_size
from cacheloader_daemon.room import Floors, shares
from cacheloader_daemon.store.member import DirectoryStatus, Member
from cacheloader_daemon.store.trouble import BlobLost, DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

    from cacheloader.errors import CacheUnusable
    from cacheloader_daemon.store.incoming import Incoming
    from cacheloader_daemon.store.records import LeasedFiles, Resident
    from cacheloader_daemon.store.store import Store

log = logging.getLogger(__name__)


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool can do at one moment.

    Attributes:
        limit_bytes: What it may hold with its overhead: the quota, or less where disks are full, sick or gone.
        overhead_bytes: What it holds besides blobs, downloads and leftovers.
        takes_shards: Whether any directory does.
    """

    limit_bytes: int
    overhead_bytes: int
    takes_shards: bool


class Pool:
    """Safe to call from any thread; a call takes as long as a disk does.

    Args:
        stores: Open directories, at least one; owned by this object.
        cache_bytes: What all together may hold; ``None`` for a part of what they have room for.
        floors: What is left free on each disk.
        verify_on_lease: Whether a blob is compared with its checksums each time that it is handed out.
        unusable: Directories that could not be opened, with the reason.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        *,
        cache_bytes: int | None,
        floors: Floors | None = None,
        verify_on_lease: bool = False,
        unusable: Mapping[Path, CacheUnusable] | None = None,
    ) -> None:
        self._verify_on_lease = verify_on_lease
        self._unusable = dict(unusable or {})
        self._on_lost: Callable[[list[bytes]], None] = lambda _: None
        self._members = [Member(store, floors or Floors(), lost=self._tell_lost) for store in stores]
        self._share_out(cache_bytes)
        self._drop_twins()

    @property
    def quota_bytes(self) -> int:
        """What the pool holds at most, when all is well."""
        return sum(member.share_bytes for member in self._members)

    @property
    def leftover_bytes(self) -> int:
        """What damaged blobs take that are kept, and files that a disk did not let us unlink."""
        return sum(member.store.leftover_bytes for member in self._members if member.health.serves)

    def listen(self, on_lost: Callable[[list[bytes]], None]) -> None:
        """From now on call ``on_lost``, from any thread, with the keys of blobs that vanish while nobody asks."""
        self._on_lost = on_lost

    def __contains__(self, key: bytes) -> bool:
        return self._holder(key) is not None

    def resident(self) -> list[Resident]:
        """All blobs, the one used longest ago first; those whose last use is not known come before all others."""
        lists = [member.store.resident() for member in self._members]
        if len(lists) == 1:
            return lists[0]
        return sorted(itertools.chain.from_iterable(lists), key=lambda blob: blob.accessed_ns)

    def all_keys(self) -> list[bytes]:
        """The keys of all blobs."""
        return [key for member in self._members for key in member.store.all_keys()]

    def reserve_bytes(self, size_bytes: int) -> int:
        """Upper bound of what a shard of ``size_bytes`` and its sample index take on any of the disks."""
        return max(member.store.reserve_bytes(size_bytes) for member in self._members)

    def begin(self, key: bytes, *, size_bytes: int) -> Incoming:
        """Make room for a shard on the directory that has the most left of its share.

        Raises:
            DiskTrouble: No directory takes it; the text says why the last one did not.
        """
        last: DiskTrouble | None = None
        for member in sorted(self._members, key=lambda one: one.own_bytes - one.share_bytes):
            try:
                member.refuse(member.store.reserve_bytes(size_bytes))
                return member.store.begin(key, size_bytes=size_bytes)
            except DiskTrouble as trouble:
                # The reason that says the most: a directory that took no shards before is no news.
                last = trouble if last is None or member.health.takes else last
        assert last is not None, "a pool has a directory"
        raise last

    def is_slow(self, key: bytes) -> bool:
        """Whether leasing a blob may mean to read all of it first."""
        return self._verify_on_lease or any(member.store.is_slow(key) for member in self._members)

    def lease(self, key: bytes) -> LeasedFiles:
        """Open a blob; a suspect one is verified first. Counts as a use of it.

        Raises:
            BlobLost: There is no such blob, or it turned out to be damaged and was set aside.
            DiskTrouble: It cannot be opened for another reason, such as too many open files.
        """
        member = self._holder(key)
        if member is None:
            raise BlobLost(key)
        return member.store.lease(key, verify=self._verify_on_lease)

    def evict(self, key: bytes) -> int:
        """Unlink a blob; readers that have it open are not disturbed.

        Returns:
            Bytes that it took, measured before; they are free once nobody has it open. 0 if there is no such blob.

        Raises:
            DiskTrouble: The disk refuses; the file is still there, and the blob is known no more until the next start.
        """
        member = self._holder(key)
        return 0 if member is None else member.store.evict(key)

    def verify(self, key: bytes, sum_up: Callable[[int, int], int]) -> bool:
        """As ``Store.verify``; who listens hears of a blob that was damaged."""
        member = self._holder(key)
        if member is None:
            return False
        is_sound = member.store.verify(key, sum_up)
        if not is_sound and key not in self:
            self._tell_lost([key])
        return is_sound

    def remember_samples(self, key: bytes, num_samples: int) -> None:
        """Keep the sample count of a shard, beyond its eviction; a disk that does not take it is logged."""
        for member in self._writable():
            if member.store.remember_samples(key, num_samples):
                return

    def samples(self, key: bytes) -> int | None:
        """The sample count of a shard, ``None`` if it is not remembered."""
        for member in self._members:
            with contextlib.suppress(DiskTrouble):
                found = member.store.samples(key) if member.health.serves else None
                if found is not None:
                    return found
        return None

    def put_manifest(self, digest: str, block: Buffer) -> None:
        """Keep a manifest under its digest, in the first directory that takes it.

        Raises:
            DiskTrouble: None does.
        """
        last: DiskTrouble = DiskTrouble(errno.EIO, "no cache directory takes anything", digest)
        for member in self._writable():
            try:
                member.store.put_manifest(digest, block)
            except DiskTrouble as trouble:
                last = trouble
            else:
                return
        raise last

    def open_manifest(self, digest: str) -> int | None:
        """A fresh read-only descriptor of a manifest, owned by the caller; ``None`` if it is not there."""
        for member in self._members:
            with contextlib.suppress(DiskTrouble):
                fd = member.store.open_manifest(digest) if member.health.serves else None
                if fd is not None:
                    return fd
        return None

    def survey(self) -> Survey:
        """Look at every disk: what the pool may hold now, what it holds besides blobs, and whether it takes more."""
        for member in self._members:
            member.measure()
        self._bound()
        return Survey(
            limit_bytes=min(self.quota_bytes, sum(member.limit_bytes for member in self._members)),
            overhead_bytes=sum(member.overhead_bytes for member in self._members),
            takes_shards=any(member.health.takes for member in self._members),
        )

    def sync(self) -> None:
        """Bring everything to the disks.

        Raises:
            DiskTrouble: One of them refuses.
        """
        for member in self._members:
            member.store.sync()

    def status(self) -> list[DirectoryStatus]:
        """Every directory, those included that could not be opened."""
        unusable = [
            DirectoryStatus(
                directory=str(path), condition="unusable", cause=error.message, share_bytes=0, limit_bytes=0, store=None
            )
            for path, error in self._unusable.items()
        ]
        return [member.status() for member in self._members] + unusable

    def close(self) -> None:
        """Bring everything to the disks and note a clean end; calling it again does nothing."""
        for member in self._members:
            member.store.close()

    def _holder(self, key: bytes) -> Member | None:
        return next((member for member in self._members if key in member.store), None)

    def _writable(self) -> list[Member]:
        return [member for member in self._members if member.health.takes]

    def _tell_lost(self, keys: list[bytes]) -> None:
        if keys:
            self._on_lost(keys)

    def _share_out(self, cache_bytes: int | None) -> None:
        disks = [member.look() for member in self._members]
        crowds = Counter(disk.device for disk in disks if disk is not None)
        for device in (device for device, crowd in crowds.items() if crowd > 1):
            log.warning(
                "several cache directories lie on one disk (device %d), which makes them neither larger nor faster; "
                "is one of them not mounted?", device,
            )  # fmt: skip
        room = [
            member.store.occupied_bytes + (max(0, disk.spare_bytes) // crowds[disk.device] if disk is not None else 0)
            for member, disk in zip(self._members, disks, strict=True)
        ]
        for member, share_bytes in zip(self._members, shares(cache_bytes, room), strict=True):
            member.share_bytes = share_bytes
        if sum(room) < self.quota_bytes:
            log.warning(
                "the cache may hold %s and its disk has room for %s; what does not fit is served from memory",
                format_size(self.quota_bytes), format_size(sum(room)),
            )  # fmt: skip
        self._bound()

    def _bound(self) -> None:
        disks = [(member, member.look() if member.health.serves else None) for member in self._members]
        crowds = Counter(disk.device for _, disk in disks if disk is not None)
        for member, disk in disks:
            if disk is None:
                member.bound(0, has_inodes=True)
            else:
                member.bound(disk.spare_bytes // crowds[disk.device], has_inodes=disk.has_inodes)

    def _drop_twins(self) -> None:
        """A directory that was away may hold what the others have fetched since."""
        for number, member in enumerate(self._members[1:], start=1):
            for key in member.store.all_keys():
                if any(key in other.store for other in self._members[:number]):
                    with contextlib.suppress(DiskTrouble):
                        member.store.evict(key)
