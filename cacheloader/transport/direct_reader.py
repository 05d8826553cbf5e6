"""One session of a helper process: its plan, its leases, and the shards that it will need next."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cacheloader.errors import ProtocolError
from cacheloader.transport.direct_plan import Lookahead

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.manifest.record import Manifest
    from cacheloader.transport.direct_dataset import DirectDataset
    from cacheloader.transport.direct_shards import ShardInMemory, ShardMemory

SHARDS_AHEAD = 2
"""Fetched before they are asked for: enough to hide the origin behind the reading of one shard."""

Shard = tuple["DirectDataset", int]
"""A shard of all that a helper process holds in memory: data sets are told apart by who they are."""


class DirectReader:
    """What one client does with one data set.

    Args:
        dataset: The data set.
        memory: The shards that all sessions of the process share.
        moved: Called when the shards that it needs soon may be others.
    """

    def __init__(self, dataset: DirectDataset, memory: ShardMemory[Shard], *, moved: Callable[[], None]) -> None:
        self.dataset = dataset
        self.soon: list[int] = []
        """The shards that it needs next, the first one first, those that are leased left out."""
        self._memory = memory
        self._moved = moved
        self._lookahead: Lookahead | None = None
        self._leases: Counter[int] = Counter()

    @property
    def manifest(self) -> Manifest:
        """That of its data set."""
        return self.dataset.manifest

    def follow(self, block: bytes, *, num_accesses: int, clock: int) -> None:
        """Take the coming accesses, as they travel, and let the first of them be fetched.

        Raises:
            ProtocolError: They do not fit the data set.
        """
        self._lookahead = Lookahead.from_block(
            block, num_accesses=num_accesses, clock=clock, num_shards=len(self.manifest)
        )
        self._look_ahead()

    def advance(self, clock: int) -> None:
        """The client has finished with every row before ``clock``."""
        if self._lookahead is not None:
            self._lookahead.advance(clock)
            self._look_ahead()

    async def acquire(self, shard: int) -> tuple[ShardInMemory, bool]:
        """A shard, leased until ``release``, and whether it was in memory already.

        Raises:
            ProtocolError: There is no such shard.
            OriginError, DatasetError: It cannot be had.
        """
        if not 0 <= shard < len(self.manifest):
            raise ProtocolError(f"shard {shard} of a data set of {len(self.manifest)} shards")
        leased = await self._memory.acquire((self.dataset, shard))
        self._leases[shard] += 1
        self._look_ahead()
        return leased

    def release(self, shard: int) -> None:
        """The client gives back one lease of a shard; one that it does not have does nothing."""
        if self._leases[shard] > 0:
            self._leases[shard] -= 1
            self._memory.release((self.dataset, shard))
            self._look_ahead()

    def close(self) -> None:
        """The client is gone: its leases and its plan end."""
        self._lookahead = None
        self.soon = []
        for shard in list(self._leases.elements()):
            self._memory.release((self.dataset, shard))
        self._leases.clear()
        self._moved()

    def _look_ahead(self) -> None:
        if self._lookahead is not None:
            self.soon = self._lookahead.soon(
                SHARDS_AHEAD, skip=lambda shard: self._memory.is_leased((self.dataset, shard))
            )
            self._moved()
