"""The disk let us down: one exception, mapped in one place."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import lmdb

if TYPE_CHECKING:
    from collections.abc import Iterator


class DiskTrouble(OSError):
    """The cache directory cannot take, or give, what it should: full, read-only, broken.

    ``errno``, ``strerror`` and ``filename`` are as in any ``OSError``. What was begun has been undone as far as the
    disk allowed it. Never shown to a user: the shard is served from memory instead.
    """


class BlobLost(DiskTrouble, KeyError):
    """There is no such blob: it is missing, or did not hold what was stored and is gone now. It can be fetched anew.

    Args:
        key: The blob.
    """

    def __init__(self, key: bytes) -> None:
        super().__init__(errno.ENOENT, "there is no such blob", key.hex())


@contextmanager
def disk_trouble(what: str, path: str) -> Iterator[None]:
    """Turn what the operating system or LMDB says within the block into ``DiskTrouble``.

    Args:
        what: What was being done, such as ``"writing a shard"``.
        path: Where.
    """
    try:
        yield
    except DiskTrouble:
        raise
    except OSError as error:
        number = error.errno or errno.EIO
        raise DiskTrouble(number, f"{what}: {os.strerror(number)}", path) from error
    except lmdb.Error as error:
        # Errors of the operating system carry its number; LMDB's own have negative ones, and all mean a broken file.
        code = getattr(error, "code", 0)
        number = code if isinstance(code, int) and code > 0 else errno.EIO
        raise DiskTrouble(number, f"{what}: {error}", path) from error
