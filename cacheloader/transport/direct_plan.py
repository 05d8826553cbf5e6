"""Which shards a plan needs next. Arithmetic only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheloader.errors import ProtocolError
from cacheloader.protocol.plans import Accesses

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray


class Lookahead:
    """The accesses of one session, from its clock on.

    Args:
        stop_clock: int64 [n]; one past the last row that needs the shard in this access.
        shard: int32 [n]; index in the manifest, in the order of first use.
        clock: Where the session stands.
    """

    def __init__(self, *, stop_clock: NDArray[np.int64], shard: NDArray[np.int32], clock: int) -> None:
        self._stop_clock = stop_clock
        self._shard = shard
        self._clock = clock
        self._begin = 0  # every access before this one is over

    @classmethod
    def from_block(cls, block: bytes, *, num_accesses: int, clock: int, num_shards: int) -> Lookahead:
        """The plan as it travels (see ``protocol.messages.FollowPlan``).

        Raises:
            ProtocolError: It has another length, or names a shard that is not there.
        """
        accesses = Accesses.from_buffer(block, num_accesses)
        shard = accesses.shard
        if num_accesses and not 0 <= int(shard.min()) <= int(shard.max()) < num_shards:
            raise ProtocolError(
                f"a plan names the shards {shard.min()} to {shard.max()} of a data set of {num_shards} shards"
            )
        return cls(stop_clock=accesses.stop_clock, shard=shard, clock=clock)

    def advance(self, clock: int) -> None:
        """The session has finished with every row before ``clock``."""
        self._clock = clock
        while self._begin < len(self._shard) and self._stop_clock[self._begin] <= clock:
            self._begin += 1

    def soon(self, count: int, *, skip: Callable[[int], bool]) -> list[int]:
        """The next ``count`` different shards that are needed, in the order of need.

        Args:
            count: How many at most.
            skip: Tells of a shard that it does not count, such as one that is leased.
        """
        found: dict[int, None] = {}
        for access in range(self._begin, len(self._shard)):
            shard = int(self._shard[access])
            if self._stop_clock[access] > self._clock and shard not in found and not skip(shard):
                found[shard] = None
                if len(found) == count:
                    break
        return list(found)
