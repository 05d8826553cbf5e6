"""A client's announced accesses, mapped from its sealed memory file without a copy."""

from __future__ import annotations

import mmap
import os

from cacheloader import fdpass
from cacheloader.errors import ProtocolError
from cacheloader.protocol.plans import BYTES_PER_ACCESS, Accesses

MAX_ACCESSES = 2**22
"""Twenty epochs of 200,000 shards. The planner sorts them on the loop, at about a million a second."""


def map_accesses(fd: int, num_accesses: int) -> Accesses:
    """The accesses in ``fd``, which may be closed afterwards; the planner checks what is in them.

    Raises:
        ProtocolError: The file is not sealed or has another length.
    """
    if not 0 <= num_accesses <= MAX_ACCESSES:
        raise ProtocolError(f"a plan of {num_accesses} accesses; it may hold up to {MAX_ACCESSES}")
    # Sealed: its writer can no longer change it behind the checks, nor shrink it, which would kill a reader. Asked
    # before the size, which may else be another one by then.
    is_sealed = fdpass.is_sealed(fd)
    size_bytes = os.fstat(fd).st_size
    if not is_sealed or size_bytes != num_accesses * BYTES_PER_ACCESS:
        raise ProtocolError(
            f"a plan of {num_accesses} accesses has to be a sealed memory file of "
            f"{num_accesses * BYTES_PER_ACCESS} bytes; this one has {size_bytes}"
        )
    # An empty file cannot be mapped.
    block = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) if num_accesses else b""
    return Accesses.from_buffer(block, num_accesses)
