"""The shards of one data set, which of them are there or are to stay, and who reads them by which plan."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from cacheloader_daemon.plan.accesses import AccessTable, plan_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cacheloader_daemon.plan.events import PlanFollowed, ShardRef
    from cacheloader_daemon.plan.readers import Reader


class Catalog:
    """The shards of a data set that some sessions opened, and the plans they follow over them.

    Args:
        shards: In manifest order.
    """

    def __init__(self, shards: Sequence[ShardRef]) -> None:
        self.shards = shards
        self.keys = [shard.key for shard in shards]
        self.reserve_bytes = np.fromiter((shard.reserve_bytes for shard in shards), dtype=np.int64, count=len(shards))
        self.index: dict[bytes, int] = {}
        for place, key in enumerate(self.keys):
            self.index.setdefault(key, place)
        self.canonical = np.fromiter((self.index[key] for key in self.keys), dtype=np.int32, count=len(shards))
        self.present = np.zeros(len(shards), dtype=np.uint8)
        self.kept = np.zeros(len(shards), dtype=bool)
        """Shards that stay from epoch to epoch, see ``retention``."""
        self.to_fill: deque[int] = deque()
        """Of them, those that were missing when they were chosen, soonest use first."""
        self.spent: deque[int] = deque()
        """Those that stay, as they were read; oldest first. Some may have left or been read again since."""
        self.num_passed = 0
        """Accesses that readers have left behind."""
        self.num_filled = 0
        """Shards that were fetched only to fill the cache."""
        self.num_sessions = 0
        self.readers: dict[bytes, list[Reader]] = {}
        """By digest of the plan."""
        self._rank: NDArray[np.int64] | None = None
        self._draft: AccessTable | None = None

    @property
    def rank(self) -> NDArray[np.int64]:
        """Places in the order of their keys, which are hashes."""
        if self._rank is None:
            self._rank = np.argsort(np.array([int.from_bytes(key[:8], "big") for key in self.keys], dtype=np.uint64))
        return self._rank

    def places(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Index of each key, -1 for one that is not part of it."""
        return np.fromiter((self.index.get(key, -1) for key in keys), dtype=np.int64, count=len(keys))

    def table(self, plan: PlanFollowed) -> AccessTable:
        """The plan's table, an existing one where somebody follows an equal plan or it was asked for just before.

        Raises:
            ProtocolError: The arrays break the rules of a plan.
        """
        digest = plan_digest(plan.first_clock, plan.stop_clock, plan.shard)
        if digest in self.readers:
            return self.readers[digest][0].table
        if self._draft is None or self._draft.digest != digest:
            self._draft = AccessTable(
                digest=digest,
                first_clock=plan.first_clock,
                stop_clock=plan.stop_clock,
                shard=plan.shard,
                canonical=self.canonical,
                reserve_bytes=self.reserve_bytes,
            )
        return self._draft
