"""Copies of a rank's event files in an object store, made while it trains by a process of their own.

That process outlives a rank that is killed and copies what it left. The training process imports no store's library,
waits for nothing but the last copy, and for that no longer than it was told.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cacheloader.errors import DaemonUnavailable
from cacheloader.transport import process

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODULE = "cacheloader.goodput.archivist"
TIMEOUT_S = 60.0
MAX_MESSAGE_BYTES = 2**16

_log = logging.getLogger(__name__)


class Archive:
    """What one rank tells its archivist.

    Args:
        url: Where the copies go: a URL that fsspec knows.
        storage_options: What fsspec's file system of that URL takes, as JSON knows it; never on a command line.
        folder: The run's folder.
        attempt: Name of the launch.
        rank: This process.
        world_size: Ranks of the attempt.
        timeout_s: How long the last copies may take, of a rank that ends by itself and of one that was killed.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any],
        folder: Path,
        attempt: str,
        rank: int,
        world_size: int,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._url, self._timeout_s, self._pid = url, timeout_s, os.getpid()
        self._has_warned = False
        self._child: process.Child | None = None
        task = {
            "url": url, "options": dict(storage_options), "folder": str(folder.absolute()), "attempt": attempt,
            "rank": rank, "world_size": world_size, "timeout_s": timeout_s, "parent": self._pid,
        }  # fmt: skip
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)  # noqa: FBT003
        nowhere = os.open(os.devnull, os.O_RDWR)
        try:
            self._say(task)
            fd = theirs.fileno()
            # Its own session: what ends the job by its terminal or process group shall not end the last copy.
            self._child = process.start(MODULE, [str(fd)], pass_fds=[fd], output=nowhere, own_session=True)
        except (DaemonUnavailable, TypeError) as error:  # options that are no JSON
            self._warn(f"its process cannot be started: {error}")
        finally:
            theirs.close()
            os.close(nowhere)

    def sealed(self, name: str) -> None:
        """This file will not change any more; returns at once."""
        if self._child is not None and self._pid == os.getpid():
            self._say(name)
            self._hear()

    def close(self) -> None:
        """Have everything copied, and wait for that as long as was agreed; calling it again does nothing."""
        child, self._child = self._child, None
        if self._pid != os.getpid():
            return
        if child is not None:
            self._say("")
            status = child.exit_status(timeout_s=self._timeout_s + 1)
            child.end(timeout_s=0)
            self._hear()
            if status:
                self._warn(f"its process ended with status {status}")
            elif status is None:
                self._warn(f"not everything was there after {self._timeout_s:g} s")
        self._socket.close()

    def _say(self, what: Any) -> None:
        with suppress(OSError):  # it is gone, or busy for very long; the last word tells it all the same
            self._socket.send(json.dumps(what).encode())

    def _hear(self) -> None:
        with suppress(OSError):
            while told := self._socket.recv(MAX_MESSAGE_BYTES):
                self._warn(told.decode(errors="replace"))

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "goodput events were not copied to %s (%s); that is tried again with each file that is full, at the "
                "end, and by the next attempt that sees this folder",
                self._url,
                why,
            )
