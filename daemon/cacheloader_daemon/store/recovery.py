"""Bringing index and directory to agree after a start: the directory is right, the index only remembers."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheloader_daemon.store.folders import names_in
from cacheloader_daemon.store.names import BlobName, is_folder, is_temporary
from cacheloader_daemon.store.space import allocated_bytes, tree_bytes
from cacheloader_daemon.store.table import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Listing:
    """What lies below ``blobs``, by name alone.

    Attributes:
        blobs: Complete blobs by key; more than one where a store gave two contents for one version.
        rubbish: (folder, name) of temporaries and of halves of blobs.
        foreign_bytes: What files take that are none of ours; they are left alone.
    """

    blobs: dict[bytes, list[BlobName]] = field(default_factory=dict)
    rubbish: list[tuple[str, str]] = field(default_factory=list)
    foreign_bytes: int = 0


@dataclass(slots=True)
class Recovery:
    """What was found and what has to be done about it.

    Attributes:
        rows: Every blob that stays.
        changed: Rows that the index lacks or has otherwise.
        gone: Keys of rows without a blob.
        rubbish: (folder, name) of files to remove.
        foreign_bytes: What files take that are none of ours.
    """

    rows: dict[bytes, Row] = field(default_factory=dict)
    changed: list[Row] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)
    rubbish: list[tuple[str, str]] = field(default_factory=list)
    foreign_bytes: int = 0


def list_blobs(blobs_fd: int) -> Listing:
    """Names below the directory ``blobs_fd``; no file is opened, and only a foreign one is looked at."""
    listing = Listing()
    for folder in sorted(names_in(".", dir_fd=blobs_fd)):
        if not is_folder(folder):
            _foreign(listing, folder, blobs_fd)
            continue
        halves: dict[BlobName, set[bool]] = {}
        for name in names_in(folder, dir_fd=blobs_fd):
            parsed = BlobName.parse(name, folder=folder)
            if parsed is not None:
                halves.setdefault(parsed[0], set()).add(parsed[1])
            elif is_temporary(name):
                listing.rubbish.append((folder, name))
            else:
                _foreign(listing, f"{folder}/{name}", blobs_fd)
        for blob, kinds in halves.items():
            if len(kinds) == 2:
                listing.blobs.setdefault(blob.key, []).append(blob)
            else:
                # A crash between the two steps of publishing or of evicting.
                listing.rubbish.append((folder, blob.data if True in kinds else blob.index))
    return listing


def reconcile(known: Mapping[bytes, Row], listing: Listing, blobs_fd: int, *, suspect_after_ns: int | None) -> Recovery:
    """Compare the index with the directory.

    Args:
        known: The index; empty if it was thrown away.
        listing: The directory.
        blobs_fd: The directory, to look at files that the index does not know.
        suspect_after_ns: Blobs stamped later may not have reached the disk before a power failure; ``None`` if there
            was none, and then files that the index knows are not looked at.
    """
    recovery = Recovery(rubbish=list(listing.rubbish), foreign_bytes=listing.foreign_bytes)
    is_suspect: Callable[[int], bool] = lambda stamp: suspect_after_ns is not None and stamp > suspect_after_ns  # noqa: E731
    for key, blobs in listing.blobs.items():
        row = known.get(key)
        if row is not None and row.name in blobs and suspect_after_ns is None:
            best: Row | None = row
        else:
            found = [seen for blob in blobs if (seen := _look(blob, blobs_fd, is_suspect)) is not None]
            best = max(
                found, key=lambda seen: (row is not None and seen.name == row.name, seen.accessed_ns), default=None
            )
        for blob in blobs:
            if best is None or blob != best.name:
                recovery.rubbish += [(blob.folder, blob.data), (blob.folder, blob.index)]
        if best is not None:
            recovery.rows[key] = best
            if best != row:
                recovery.changed.append(best)
    recovery.gone = [key for key in known if key not in recovery.rows]
    return recovery


def _look(blob: BlobName, blobs_fd: int, is_suspect: Callable[[int], bool]) -> Row | None:
    """The row of a blob, from its two files; ``None`` if they are not as long as their name says."""
    used_bytes, stamp_ns = 0, 0
    for name, size_bytes in ((blob.data, blob.size_bytes), (blob.index, blob.index_bytes)):
        try:
            status = os.stat(f"{blob.folder}/{name}", dir_fd=blobs_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if status.st_size != size_bytes:
            log.warning("%s has %d bytes; it is removed", name, status.st_size)
            return None
        used_bytes += allocated_bytes(status)
        stamp_ns = max(stamp_ns, status.st_mtime_ns)
    return Row(name=blob, used_bytes=used_bytes, accessed_ns=stamp_ns, suspect=is_suspect(stamp_ns))


def _foreign(listing: Listing, path: str, blobs_fd: int) -> None:
    log.warning("blobs/%s is none of our files; it is left alone and counts against the quota", path)
    listing.foreign_bytes += tree_bytes(path, dir_fd=blobs_fd)
