"""What a waiting request is handed: open descriptors of one shard."""

from __future__ import annotations

import os

import msgspec

SAMPLE_COUNT_BYTES = 8
"""Every index block starts with the sample count, see ``cacheloader.formats.base.index_samples``."""


class ShardLease(msgspec.Struct, frozen=True, kw_only=True):
    """Read-only descriptors, owned by whoever holds the record.

    Attributes:
        data_fd: The shard's bytes.
        index_fd: Its sample index.
        size_bytes: Length of the shard.
        index_bytes: Length of the index.
        source: ``"nvme"``, ``"origin"`` or ``"memory"``, as in ``protocol.messages.Leased``.
        index_head: The first bytes of the index, which hold the sample count.
    """

    data_fd: int
    index_fd: int
    size_bytes: int
    index_bytes: int
    source: str
    index_head: bytes

    def duplicate(self) -> ShardLease:
        """The same lease for another receiver; each has its own descriptors to close."""
        # Opened anew and not duplicated: the receivers shall not share a file position.
        data_fd = os.open(f"/proc/self/fd/{self.data_fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            index_fd = os.open(f"/proc/self/fd/{self.index_fd}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(data_fd)
            raise
        return msgspec.structs.replace(self, data_fd=data_fd, index_fd=index_fd)

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.data_fd)
        os.close(self.index_fd)
