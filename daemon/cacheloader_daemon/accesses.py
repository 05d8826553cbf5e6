"""A client's announced accesses, mapped from its sealed memory file without a copy."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cacheloader import fdpass
from cacheloader.errors import ProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ACCESSES = 2**22
"""Twenty epochs of 200,000 shards. The planner sorts them on the loop, at about a million a second."""

_BYTES_PER_ACCESS = 8 + 8 + 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Accesses:
    """The arrays of ``FollowPlan`` as they came; the planner checks what is in them.

    Attributes:
        first_clock: int64 [n].
        stop_clock: int64 [n].
        shard: int32 [n].
    """

    first_clock: NDArray[np.int64]
    stop_clock: NDArray[np.int64]
    shard: NDArray[np.int32]


def map_accesses(fd: int, num_accesses: int) -> Accesses:
    """The accesses in ``fd``, which may be closed afterwards.

    Raises:
        ProtocolError: The file is not sealed or has another length.
    """
    if not 0 <= num_accesses <= MAX_ACCESSES:
        raise ProtocolError(f"a plan of {num_accesses} accesses; it may hold up to {MAX_ACCESSES}")
    # Sealed: its writer can no longer change it behind the checks, nor shrink it, which would kill a reader. Asked
    # before the size, which may else be another one by then.
    is_sealed = fdpass.is_sealed(fd)
    size_bytes = os.fstat(fd).st_size
    if not is_sealed or size_bytes != num_accesses * _BYTES_PER_ACCESS:
        raise ProtocolError(
            f"a plan of {num_accesses} accesses has to be a sealed memory file of "
            f"{num_accesses * _BYTES_PER_ACCESS} bytes; this one has {size_bytes}"
        )
    # An empty file cannot be mapped.
    block = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) if num_accesses else b""
    return Accesses(
        first_clock=np.frombuffer(block, dtype="<i8", count=num_accesses),
        stop_clock=np.frombuffer(block, dtype="<i8", count=num_accesses, offset=8 * num_accesses),
        shard=np.frombuffer(block, dtype="<i4", count=num_accesses, offset=16 * num_accesses),
    )
