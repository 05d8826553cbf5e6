"""Memory that a process frees and needs again at once: the bytes of batches."""

from __future__ import annotations

import functools

import numpy as np

_LARGEST_BLOCK_BYTES = (32 << 20) - (64 << 10)


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep what is freed, up to 64 MiB, instead of giving it back to the kernel; once a process.

    glibc starts by giving back all that is free above 128 KiB, and every batch then pays for its memory again, page by
    page, which takes twice as long as reading it. It raises that limit by itself: to twice the largest block, of at
    most 32 MiB, that the program has ever mapped and freed. Most training processes get there with the first large
    array they free; here such a block is allocated, left untouched and freed. Limits that the user has set
    (MALLOC_TRIM_THRESHOLD_ and the like) stay as they are, and so does another C library.
    """
    np.empty(_LARGEST_BLOCK_BYTES, dtype=np.uint8)
