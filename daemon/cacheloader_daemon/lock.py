"""One daemon a cache directory: whoever holds ``daemon.lock``.

The kernel lets go of the lock when the process ends, however it ends; nothing has to be cleaned up.

Source: flock(2).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING, Self

from cacheloader.errors import CacheUnusable, DaemonUnavailable
from cacheloader_daemon.store.directory import shown, way_out

if TYPE_CHECKING:
    from pathlib import Path

LOCK_NAME = "daemon.lock"


class DirectoryLock:
    """Held from construction to ``close``."""

    def __init__(self, directory: Path) -> None:
        """Make ``directory`` if it is missing, and lock it.

        Raises:
            DaemonUnavailable: Another daemon holds it; the text names its process.
            CacheUnusable: The directory or the lock file cannot be made.
        """
        path = directory / LOCK_NAME
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A plain file for everybody who may look at the directory; nobody has to write to it but the daemon.
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise CacheUnusable(
                f"the cache directory {shown(directory)} cannot be used: {error.strerror}; {way_out(error)}",
                uri=str(directory),
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise DaemonUnavailable(
                f"another daemon (process {holder or 'unknown'}) uses the cache directory {directory}; stop it, or "
                "choose another cache_dir",
                uri=str(directory),
            ) from error
        except OSError as error:
            os.close(self._fd)
            raise CacheUnusable(
                f"the cache directory {directory} cannot be locked: {error.strerror}; choose one on a local disk "
                "(cache_dir)",
                uri=str(directory),
            ) from error

        # A courtesy to whoever comes next. A full disk that does not take it is no obstacle, and says so elsewhere.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let another daemon have the directory; calling it again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
