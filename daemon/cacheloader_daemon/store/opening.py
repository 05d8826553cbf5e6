"""From a directory in any state to a store that can be used: what to trust, what to rebuild, what to verify."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheloader_daemon.store.blobs import BlobFiles
from cacheloader_daemon.store.lifeline import Lifeline, Phase, Record, current_boot_id
from cacheloader_daemon.store.manifests import ManifestFiles
from cacheloader_daemon.store.recovery import list_blobs, reconcile
from cacheloader_daemon.store.space import BLOCK_BYTES
from cacheloader_daemon.store.table import BlobTable, Row, TableBroken

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

TABLE = "lmdb"
SET_ASIDE = "lmdb.broken"
"""An index that was not trusted is kept until the next start, for whoever wants to know why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The parts of a store.

    Attributes:
        boot_id: The machine's present boot.
        barrier_ns: Blobs stamped up to here have reached the disk, or are suspect.
        lifeline: Where that is noted.
        table: The index; it agrees with ``rows``.
        files: The blobs' files.
        manifests: The manifests' files.
        rows: Every blob.
        unflushed: Blobs that a daemon of this boot published and did not bring to the disk.
        foreign_bytes: What files below ``blobs`` take that are none of ours.
    """

    boot_id: str
    barrier_ns: int
    lifeline: Lifeline
    table: BlobTable
    files: BlobFiles
    manifests: ManifestFiles
    rows: dict[bytes, Row]
    unflushed: list[Row]
    foreign_bytes: int


def open_parts(directory: Path, *, dir_fd: int, blobs_fd: int, manifests_fd: int) -> Opened:
    """Recover what the last daemon left.

    Args:
        directory: The cache directory.
        dir_fd: The same, open.
        blobs_fd: Its directory ``blobs``.
        manifests_fd: Its directory ``manifests``.

    Raises:
        OSError: The disk does not allow it.
    """
    lifeline = Lifeline(dir_fd)
    boot_id = current_boot_id()
    last = lifeline.read()
    listing = list_blobs(blobs_fd)
    # A first start has nothing to lose; a lost record beside blobs is taken for a power failure.
    was_clean = last.phase is Phase.CLOSED if last is not None else not listing.blobs
    same_boot = last is not None and last.boot_id == boot_id
    barrier_ns = last.barrier_ns if last is not None else 0
    doubtful = last.doubtful if last is not None else not was_clean
    # A daemon that ended while it opened the index may have been killed by it; it will not kill the next one.
    trusts_table = (was_clean or same_boot) and (last is None or last.phase is not Phase.OPENING)
    lifeline.write(Record(boot_id=boot_id, phase=Phase.OPENING, barrier_ns=barrier_ns, doubtful=True))

    table, known, is_fresh = _open_table(directory, trusts=trusts_table)
    try:
        suspect_after_ns: int | None = None
        if doubtful and is_fresh:
            suspect_after_ns = -1
        elif not was_clean and not same_boot:
            suspect_after_ns = barrier_ns
        found = reconcile(known, listing, blobs_fd, suspect_after_ns=suspect_after_ns)
        block_bytes = max(BLOCK_BYTES, os.fstatvfs(blobs_fd).f_frsize)
        files = BlobFiles(blobs_fd, block_bytes=block_bytes)
        files.remove_rubbish(found.rubbish)
        table.delete(found.gone)
        table.put(found.changed)
        num_suspects = sum(row.suspect for row in found.rows.values())
        if found.rubbish or found.gone or found.changed or num_suspects:
            log.info(
                "%s: %d blobs, of which %d were not in the index and %d are verified before they are used; "
                "%d rows without a blob and %d partial files removed",
                directory, len(found.rows), len(found.changed), num_suspects, len(found.gone), len(found.rubbish),
            )  # fmt: skip
        manifests = ManifestFiles(manifests_fd)
        lifeline.write(Record(boot_id=boot_id, phase=Phase.RUNNING, barrier_ns=barrier_ns, doubtful=num_suspects > 0))
    except BaseException:
        table.close()
        raise
    unflushed = [row for row in found.rows.values() if row.accessed_ns > barrier_ns] if not was_clean else []
    return Opened(
        boot_id=boot_id,
        barrier_ns=barrier_ns,
        lifeline=lifeline,
        table=table,
        files=files,
        manifests=manifests,
        rows=found.rows,
        unflushed=unflushed,
        foreign_bytes=found.foreign_bytes,
    )


def _open_table(directory: Path, *, trusts: bool) -> tuple[BlobTable, dict[bytes, Row], bool]:
    """The table, its rows, and whether it begins empty."""
    path, aside = directory / TABLE, directory / SET_ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    is_fresh = not path.exists()
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
