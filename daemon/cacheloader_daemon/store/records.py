"""What the store tells and hands out."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Resident(NamedTuple):
    """A blob in the store.

    Attributes:
        key: The shard.
        size_bytes: Its length.
        used_bytes: What it takes on disk with its sample index.
        accessed_ns: When it was used last, 0 if that is not known.
    """

    key: bytes
    size_bytes: int
    used_bytes: int
    accessed_ns: int


class LeasedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh read-only descriptors of one blob, owned by the receiver.

    Attributes:
        data_fd: The shard's bytes.
        index_fd: Its sample index.
        size_bytes: Length of the shard.
        index_bytes: Length of the index.
    """

    data_fd: int
    index_fd: int
    size_bytes: int
    index_bytes: int


class StoreStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the store holds, and what has happened since the start.

    Attributes:
        blobs: Blobs.
        used_bytes: What they take on disk.
        suspect_blobs: Of them, those to be verified before they are used.
        foreign_bytes: What files below ``blobs`` take that are none of ours.
        committed: Blobs published.
        evicted: Blobs removed on demand.
        lost: Blobs found missing or damaged.
        damaged: Of them, those that were there but unreadable, of another length or with other bytes.
        quarantined_blobs: Damaged blobs that are kept for inspection, in ``quarantine``.
        quarantined_bytes: What they take on disk.
    """

    blobs: int
    used_bytes: int
    suspect_blobs: int
    foreign_bytes: int
    committed: int
    evicted: int
    lost: int
    damaged: int
    quarantined_blobs: int
    quarantined_bytes: int
