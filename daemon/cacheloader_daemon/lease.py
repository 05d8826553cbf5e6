"""What a waiting request is handed: open descriptors of one shard."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLease:
    """Fresh read-only descriptors, owned by whoever holds the record.

    Attributes:
        data_fd: The shard's bytes.
        index_fd: Its sample index.
        size_bytes: Length of the shard.
        index_bytes: Length of the index.
        source: ``"nvme"``, ``"origin"`` or ``"memory"``, as in ``protocol.messages.Leased``.
    """

    data_fd: int
    index_fd: int
    size_bytes: int
    index_bytes: int
    source: str

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.data_fd)
        os.close(self.index_fd)
