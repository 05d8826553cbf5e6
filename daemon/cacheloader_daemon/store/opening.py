"""From a directory in any state to a store that can be used: what to trust, what to rebuild, what to verify."""

from __future__ import annotations

import logging
import os
import shutil
from typing import TYPE_CHECKING

import msgspec

from cacheloader_daemon.store.blobs import BlobFiles
from cacheloader_daemon.store.doubts import Doubts
from cacheloader_daemon.store.lifeline import Lifeline, Phase, Record, current_boot_id
from cacheloader_daemon.store.manifests import ManifestFiles
from cacheloader_daemon.store.quarantine import Quarantine
from cacheloader_daemon.store.recovery import Listing, Recovery, list_blobs, reconcile
from cacheloader_daemon.store.residents import Residents
from cacheloader_daemon.store.row import unpack_many
from cacheloader_daemon.store.space import BLOCK_BYTES
from cacheloader_daemon.store.table import BlobTable, TableBroken
from cacheloader_daemon.store.trouble import DiskTrouble

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

TABLE = "lmdb"
SET_ASIDE = "lmdb.broken"
"""An index that was not trusted is kept until the next start, for whoever wants to know why."""

REBUILD_ROWS = 4096
"""Rows of one transaction at the start, when nobody waits for another one."""


class Folders(msgspec.Struct, frozen=True, kw_only=True):
    """Open descriptors of a cache directory and of what lies in it.

    Attributes:
        root: The cache directory.
        blobs: Its ``blobs``.
        manifests: Its ``manifests``.
        quarantine: Its ``quarantine``.
    """

    root: int
    blobs: int
    manifests: int
    quarantine: int


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a store.

    Attributes:
        boot_id: The machine's present boot.
        barrier_ns: Blobs stamped up to here have reached the disk, or are suspect.
        lifeline: Where that is noted.
        table: The index; it agrees with ``residents``.
        files: The blobs' files.
        manifests: The manifests' files.
        quarantine: Damaged blobs.
        residents: Every blob.
        doubts: Those to be verified.
        all_unflushed: Whether earlier daemons may have left blobs that have not reached the disk.
        foreign_bytes: What files below ``blobs`` take that are none of ours.
    """

    boot_id: str
    barrier_ns: int
    lifeline: Lifeline
    table: BlobTable
    files: BlobFiles
    manifests: ManifestFiles
    quarantine: Quarantine
    residents: Residents
    doubts: Doubts
    all_unflushed: bool
    foreign_bytes: int


class _Past(msgspec.Struct, frozen=True, kw_only=True):
    """What the last daemon's record means.

    Attributes:
        barrier_ns: Blobs stamped up to here have reached the disk.
        was_clean: Whether it closed the store.
        power_failed: Whether the machine has stopped while the store was open.
        proven_ns: Of blobs in doubt, those stamped up to here are not.
        doubtful: Whether blobs were in doubt already.
        trusts_table: Whether its index may be read.
    """

    barrier_ns: int
    was_clean: bool
    power_failed: bool
    proven_ns: int
    doubtful: bool
    trusts_table: bool


def open_parts(directory: Path, folders: Folders) -> Opened:
    """Recover what the last daemon left.

    Args:
        directory: The cache directory.
        folders: The same, open.

    Raises:
        OSError: The disk does not allow it.
    """
    lifeline = Lifeline(folders.root)
    boot_id = current_boot_id()
    listing = list_blobs(folders.blobs)
    past = _past(lifeline.read(), boot_id, has_blobs=bool(listing.blobs))
    opening = Record(
        boot_id=boot_id,
        phase=Phase.OPENING,
        barrier_ns=past.barrier_ns,
        doubtful=past.doubtful,
        proven_ns=past.proven_ns,
    )
    lifeline.write(opening)

    block_bytes = max(BLOCK_BYTES, os.fstatvfs(folders.blobs).f_frsize)
    files = BlobFiles(folders.blobs, block_bytes=block_bytes)
    table, known, is_fresh = _open_table(directory, trusts=past.trusts_table)
    try:
        all_suspect = past.power_failed or (past.doubtful and is_fresh)
        found = reconcile(known, listing, folders.blobs, all_suspect=all_suspect, block_bytes=block_bytes)
        files.remove_rubbish(found.rubbish)
        changes = {**dict.fromkeys(found.gone), **{key: found.rows[key] for key in found.changed}}
        residents = Residents(found.rows, last_stamp_ns=past.barrier_ns)
        try:
            table.write(changes, batch_rows=REBUILD_ROWS)
        except DiskTrouble as error:
            log.warning("the index of %s cannot be written (%s); it is tried again later", directory, error)
            residents.give_back(changes)
        suspects = _suspects(found.rows) if past.doubtful else []
        _tell(directory, listing, found, num_suspects=len(suspects))
        parts = Opened(
            boot_id=boot_id,
            barrier_ns=past.barrier_ns,
            lifeline=lifeline,
            table=table,
            files=files,
            manifests=ManifestFiles(folders.manifests),
            quarantine=Quarantine(folders.quarantine, folders.blobs),
            residents=residents,
            doubts=Doubts(suspects, proven_ns=past.proven_ns),
            all_unflushed=not past.was_clean and bool(found.rows),
            foreign_bytes=found.foreign_bytes,
        )
        lifeline.write(
            Record(
                boot_id=boot_id,
                phase=Phase.RUNNING,
                barrier_ns=past.barrier_ns,
                doubtful=bool(suspects),
                proven_ns=past.proven_ns,
            )
        )
    except BaseException:
        table.close()
        raise
    return parts


def _suspects(rows: dict[bytes, bytes]) -> list[bytes]:
    return [key for key, (*_, suspect) in zip(rows, unpack_many(rows.values()), strict=True) if suspect]


def _past(last: Record | None, boot_id: str, *, has_blobs: bool) -> _Past:
    if last is None:
        # A first start has nothing to lose; a lost record beside blobs is taken for a power failure.
        return _Past(
            barrier_ns=0, was_clean=not has_blobs, power_failed=has_blobs, proven_ns=-1, doubtful=has_blobs,
            trusts_table=not has_blobs,
        )  # fmt: skip
    was_clean, same_boot = last.phase is Phase.CLOSED, last.boot_id == boot_id
    power_failed = not was_clean and not same_boot
    return _Past(
        barrier_ns=last.barrier_ns,
        was_clean=was_clean,
        power_failed=power_failed,
        # What was in doubt before stays so: barriers since then say nothing of it.
        proven_ns=last.proven_ns if last.doubtful else last.barrier_ns,
        doubtful=last.doubtful or power_failed,
        # A daemon that ended while it opened the index may have been killed by it; it will not kill the next one.
        trusts_table=not power_failed and last.phase is not Phase.OPENING,
    )


def _tell(directory: Path, listing: Listing, found: Recovery, *, num_suspects: int) -> None:
    if found.rubbish or found.gone or found.changed or num_suspects:
        log.info(
            "%s: %d blobs, of which %d were not in the index and up to %d are verified before they are used; "
            "%d rows without a blob and %d partial files removed",
            directory, len(found.rows), len(found.changed), num_suspects, len(found.gone), len(listing.rubbish),
        )  # fmt: skip


def _open_table(directory: Path, *, trusts: bool) -> tuple[BlobTable, dict[bytes, bytes], bool]:
    """The table, its rows, and whether it begins empty."""
    path, aside = directory / TABLE, directory / SET_ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    is_fresh = not (path / "data.mdb").exists()
    if not trusts and not is_fresh:
        path.rename(aside)
        is_fresh = True
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        table = BlobTable.open(path)
        try:
            return table, table.rows(), is_fresh
        except BaseException:
            table.close()
            raise
    except TableBroken as error:
        log.warning("the index %s is broken (%s); it is rebuilt from the names of the blobs", path, error)
    path.rename(aside)
    path.mkdir(mode=0o700)
    table = BlobTable.open(path)
    return table, {}, True
