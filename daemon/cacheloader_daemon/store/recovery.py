"""Bringing index and directory to agree after a start: the directory is right, the index only remembers.

Names are read and no file is opened. Only files that a trusted index lacks are looked at, since a cold disk takes half
a second for ten thousand of them.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheloader_daemon.store.folders import names_in
from cacheloader_daemon.store.names import DATA_SUFFIX, INDEX_SUFFIX, BlobName, is_folder, is_temporary, parse_stem
from cacheloader_daemon.store.row import NAME_BYTES, pack_fields, pack_name, pack_state, sizes_of, unpack_name
from cacheloader_daemon.store.space import allocated_bytes, bound_bytes, tree_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

MAX_LOOKS = 4096
"""Files that the index lacks are looked at, if they are no more: what a killed daemon had no time to note."""


@dataclass(slots=True)
class Listing:
    """What lies below ``blobs``, by name alone.

    Attributes:
        blobs: Complete blobs by key, as packed names.
        rivals: Where a store gave two contents for one version: the others.
        rubbish: (folder, name) of temporaries and of halves of blobs.
        foreign_bytes: What files take that are none of ours; they are left alone.
    """

    blobs: dict[bytes, bytes] = field(default_factory=dict)
    rivals: dict[bytes, list[bytes]] = field(default_factory=dict)
    rubbish: list[tuple[str, str]] = field(default_factory=list)
    foreign_bytes: int = 0


@dataclass(slots=True)
class Recovery:
    """What was found and what has to be done about it.

    Attributes:
        rows: Every blob that stays, packed.
        changed: Keys of rows that the index lacks or has otherwise.
        gone: Keys of rows without a blob.
        rubbish: (folder, name) of files to remove.
        foreign_bytes: What files take that are none of ours.
    """

    rows: dict[bytes, bytes] = field(default_factory=dict)
    changed: list[bytes] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)
    rubbish: list[tuple[str, str]] = field(default_factory=list)
    foreign_bytes: int = 0


def list_blobs(blobs_fd: int) -> Listing:
    """Names below the directory ``blobs_fd``; no file is opened, and only a foreign one is looked at."""
    listing = Listing()
    for folder in sorted(names_in(".", dir_fd=blobs_fd)):
        if is_folder(folder):
            _list_folder(listing, folder, blobs_fd)
        elif is_temporary(folder):
            listing.rubbish.append((".", folder))  # of a probe
        else:
            _foreign(listing, folder, blobs_fd)
    return listing


def reconcile(
    known: Mapping[bytes, bytes], listing: Listing, blobs_fd: int, *, all_suspect: bool, block_bytes: int
) -> Recovery:
    """Compare the index with the directory.

    Args:
        known: The index as packed rows; empty if it was thrown away.
        listing: The directory.
        blobs_fd: The directory, to look at files that the index does not know.
        all_suspect: Whether any blob may have to be verified, since power failed.
        block_bytes: Unit in which the file system allocates.
    """
    recovery = Recovery(rubbish=list(listing.rubbish), foreign_bytes=listing.foreign_bytes)
    rows, changed = recovery.rows, recovery.changed
    for key, name in listing.blobs.items():
        row = known.get(key)
        if row is not None and not all_suspect and row[:NAME_BYTES] == name and key not in listing.rivals:
            rows[key] = row
        else:
            changed.append(key)
    looks = len(changed) <= MAX_LOOKS
    for key in changed:
        packed = listing.blobs[key]
        if key in listing.rivals:
            packed = _choose(key, packed, listing, known.get(key, b"")[:NAME_BYTES], blobs_fd, recovery)
        used_bytes, accessed_ns = bound_bytes(*sizes_of(packed), block_bytes=block_bytes), 0
        if looks and (seen := _look(unpack_name(key, packed), blobs_fd)) is not None:
            used_bytes, accessed_ns = seen
        rows[key] = packed + pack_state(used_bytes=used_bytes, accessed_ns=accessed_ns, suspect=all_suspect)
    recovery.gone = [key for key in known if key not in rows]
    return recovery


def _list_folder(listing: Listing, folder: str, blobs_fd: int) -> None:
    names = names_in(folder, dir_fd=blobs_fd)
    data = {name[: -len(DATA_SUFFIX)] for name in names if name.endswith(DATA_SUFFIX)}
    index = {name[: -len(INDEX_SUFFIX)] for name in names if name.endswith(INDEX_SUFFIX)}
    num_ours = 0
    for stem in data & index:
        found = parse_stem(stem, folder=folder)
        if found is not None:
            num_ours += 2
            key, name = found[0], pack_name(*found[1:])
            if listing.blobs.setdefault(key, name) is not name:
                listing.rivals.setdefault(key, []).append(name)
    if num_ours == len(names):
        return
    there = set(names)
    for file in names:
        parsed = BlobName.parse(file, folder=folder)
        if parsed is not None:
            if not {parsed[0].data, parsed[0].index} <= there:
                # A crash between the two steps of publishing or of evicting.
                listing.rubbish.append((folder, file))
        elif is_temporary(file):
            listing.rubbish.append((folder, file))
        else:
            _foreign(listing, f"{folder}/{file}", blobs_fd)


def _choose(  # noqa: PLR0917
    key: bytes, packed: bytes, listing: Listing, preferred: bytes, blobs_fd: int, recovery: Recovery
) -> bytes:
    kept = unpack_name(key, packed)
    for rival in listing.rivals[key]:
        other = unpack_name(key, rival)
        winner = _newer(kept, other, preferred=preferred, blobs_fd=blobs_fd)
        loser = other if winner is kept else kept
        recovery.rubbish += [(loser.folder, loser.data), (loser.folder, loser.index)]
        kept = winner
    return pack_fields(kept)


def _newer(one: BlobName, other: BlobName, *, preferred: bytes, blobs_fd: int) -> BlobName:
    """Of two contents that a store gave for one version, the one in the index or else the later one."""
    for name in (one, other):
        if preferred and pack_fields(name) == preferred:
            return name
    stamps = [seen[1] if (seen := _look(name, blobs_fd)) is not None else -1 for name in (one, other)]
    return one if stamps[0] >= stamps[1] else other


def _look(name: BlobName, blobs_fd: int) -> tuple[int, int] | None:
    """Bytes on disk and time stamp of a blob, from its two files; ``None`` if they cannot be looked at."""
    try:
        data = os.stat(f"{name.folder}/{name.data}", dir_fd=blobs_fd, follow_symlinks=False)
        index = os.stat(f"{name.folder}/{name.index}", dir_fd=blobs_fd, follow_symlinks=False)
    except OSError:
        return None  # whoever wants to read it finds out why
    return allocated_bytes(data) + allocated_bytes(index), data.st_mtime_ns


def _foreign(listing: Listing, path: str, blobs_fd: int) -> None:
    log.warning("blobs/%s is none of our files; it is left alone and counts against the quota", path)
    listing.foreign_bytes += tree_bytes(path, dir_fd=blobs_fd)
