"""How the C library keeps memory for the bodies of range requests, which are some MiB each and live for a moment."""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

KEPT_BYTES = 64 * 2**20
"""Freed memory that stays with the process instead of going back to the kernel: eight bodies of the usual size."""

LARGEST_KEPT_BYTES = 32 * 2**20
"""Blocks above this size are mapped and unmapped one by one; glibc allows no more."""

# <malloc.h> of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def reuse_freed_memory() -> None:
    """Let a freed body's memory serve the next one; to be called before there are threads.

    Otherwise each body gets fresh pages from the kernel, which clears them first: about a tenth of what a fetch costs.
    One heap for all threads, since a body is allocated by one thread of the engine and freed by one of ours. Another C
    library than glibc is left as it is.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        log.debug("this C library has no mallopt")
        return
    settings = {_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: LARGEST_KEPT_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES}
    for name, value in settings.items():
        if not mallopt(name, value):
            log.debug("mallopt refuses %d=%d", name, value)
