"""The arrays of ``FollowPlan`` as bytes and back; what is in them, the receiver checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.errors import ProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

_CLOCK = np.dtype("<i8")
_SHARD = np.dtype("<i4")
BYTES_PER_ACCESS = 2 * _CLOCK.itemsize + _SHARD.itemsize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Accesses:
    """A session's coming accesses: access ``a`` needs ``shard[a]`` during ``[first_clock[a], stop_clock[a])``.

    Attributes:
        first_clock: int64 [n], sorted.
        stop_clock: int64 [n].
        shard: int32 [n]; index in the manifest.
    """

    first_clock: NDArray[np.int64]
    stop_clock: NDArray[np.int64]
    shard: NDArray[np.int32]

    def to_bytes(self) -> bytes:
        """The arrays one behind the other, little endian."""
        columns = ((self.first_clock, _CLOCK), (self.stop_clock, _CLOCK), (self.shard, _SHARD))
        return b"".join(np.ascontiguousarray(column, dtype=kind).tobytes() for column, kind in columns)

    @classmethod
    def from_buffer(cls, block: Buffer, num_accesses: int) -> Accesses:
        """Read the arrays where they lie; they keep ``block`` alive.

        Raises:
            ProtocolError: It has another length.
        """
        view = memoryview(block).cast("B")
        size_bytes = view.nbytes
        if num_accesses < 0 or size_bytes != num_accesses * BYTES_PER_ACCESS:
            raise ProtocolError(
                f"a plan of {num_accesses} accesses takes {num_accesses * BYTES_PER_ACCESS} bytes, not {size_bytes}"
            )
        stop_at, shard_at = _CLOCK.itemsize * num_accesses, 2 * _CLOCK.itemsize * num_accesses
        return cls(
            first_clock=np.frombuffer(view, dtype=_CLOCK, count=num_accesses),
            stop_clock=np.frombuffer(view, dtype=_CLOCK, count=num_accesses, offset=stop_at),
            shard=np.frombuffer(view, dtype=_SHARD, count=num_accesses, offset=shard_at),
        )
