"""Threads for file systems of fsspec that wait for their answers."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from cacheloader.origin.threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

_ANSWERS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
"""What is raised for an answer that was understood; anything else may have left half of one in the connection."""


class FilesystemThreads:
    """A bounded pool of threads, each with a file system of its own.

    fsspec gives an instance to one thread alone, and some keep a connection in it, such as FTP's: two requests at once
    would get each other's answers, or none. One that failed is not asked again: what it would say next is not known.

    Args:
        make: Makes a file system that is shared with nobody; any thread may call it.
        max_threads: Threads at most; they are started as they are needed.
        name: Prefix of their names.
    """

    def __init__(self, make: Callable[[], Any], *, max_threads: int, name: str) -> None:
        self._make = make
        self._own = threading.local()
        self._threads = DaemonThreads(max_threads, name=name)

    async def ask(self, call: Callable[[Any], _T]) -> _T:
        """The result of ``call`` for the file system of one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, call)

    def close(self) -> None:
        """Let the threads end, and with each its file system, that do not hang; calling it again does nothing."""
        self._threads.shutdown()

    def _ask(self, call: Callable[[Any], _T]) -> _T:
        filesystem = getattr(self._own, "filesystem", None)
        if filesystem is None:
            filesystem = self._own.filesystem = self._make()
        try:
            return call(filesystem)
        except _ANSWERS:
            raise
        except BaseException:
            self._own.filesystem = None
            raise
