"""The process that copies event files: ``python -m cacheloader.goodput.archivist SOCKET``, started by ``archive``.

It reads what to do from the socket and says there what failed, once. When its rank is gone it copies what is left and
ends.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheloader.goodput.archive import MAX_MESSAGE_BYTES
from cacheloader.goodput.places import PATTERN, Bucket

if TYPE_CHECKING:
    from collections.abc import Container

SETTLE_S = 3.0
"""How long the node's daemon may take to write its last line about a rank that died."""

S3_LIMITS = {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 1}}
"""A store that went away is noticed before the last word comes, which waits behind what is under way."""

RETRY_S = 0.5
MAX_RETRY_S = 5.0

_NAME = re.compile(r"events-.+-r(?P<rank>\d+)(\.\d{4})?\.jsonl")


@dataclass(slots=True, kw_only=True)
class Archivist:
    """The files of one rank, and which of them have been copied.

    Attributes:
        folder: The run's folder.
        url: Where the copies go.
        options: What fsspec's file system of it takes.
        rank: Whose files: those of this number in all attempts, and of the numbers that no rank has any more its share.
        world_size: Ranks of the attempt.
    """

    folder: Path
    url: str
    options: dict[str, Any]
    rank: int
    world_size: int
    _bucket: Bucket | None = None
    _there: dict[str, int] = field(default_factory=dict)

    def copy(self, *, without: Container[str] = ()) -> None:
        """Copy the files that are not there as they are here.

        Raises:
            Exception: Whatever a store's library raises; what was copied before that is not copied again.
        """
        due = [path for path in sorted(self.folder.glob(PATTERN)) if path.name not in without and self._is_due(path)]
        if due and self._bucket is None:
            options = dict(self.options)
            if self.url.startswith(("s3://", "s3a://")):
                options["config_kwargs"] = S3_LIMITS | options.get("config_kwargs", {})
            bucket = Bucket(self.url, options)
            self._there |= {Path(path).name: size for path, size in bucket.sizes().items()}
            self._bucket = bucket
        for path in due:
            if self._bucket is not None and self._is_due(path):
                size_bytes = path.stat().st_size  # one that grows meanwhile is due again
                self._bucket.put(path)
                self._there[path.name] = size_bytes

    def own(self, attempt: str) -> set[str]:
        """Names of the files of one attempt."""
        return {path.name for path in self.folder.glob(PATTERN) if path.name.startswith(f"events-{attempt}-")}

    def _is_due(self, path: Path) -> bool:
        named = _NAME.fullmatch(path.name)
        is_mine = named is not None and int(named["rank"]) % self.world_size == self.rank
        return is_mine and self._there.get(path.name) != path.stat().st_size


def main(fd: int) -> int:
    """Do what the socket says; the exit status is 0 if in the end everything was copied."""
    parent = socket.socket(fileno=fd)
    task = json.loads(parent.recv(MAX_MESSAGE_BYTES))
    names = ("url", "options", "rank", "world_size")
    archivist = Archivist(folder=Path(task["folder"]), **{name: task[name] for name in names})
    told: list[str] = []

    def attempt(without: Container[str] = ()) -> bool:
        try:
            archivist.copy(without=without)
        except Exception as error:  # noqa: BLE001  # a store's library may raise anything, and the next time is better
            if not told:
                told.append(f"{type(error).__name__}: {error}"[:1000])
                _say(parent, told[0])
            return False
        return True

    sealed: set[str] = set()
    attempt(archivist.own(task["attempt"]))  # what earlier attempts have left
    try:
        died = os.pidfd_open(task["parent"])
    except OSError:
        died = -1
    while died >= 0 and (name := _heard(parent, died)):
        sealed.add(name)
        attempt(archivist.own(task["attempt"]) - sealed)
    if died < 0 or _is_readable(died):
        time.sleep(SETTLE_S)
    signal.setitimer(signal.ITIMER_REAL, task["timeout_s"])  # ends this process, even inside a store's library
    wait_s = RETRY_S
    while not attempt():
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, MAX_RETRY_S)
    return 0


def _heard(parent: socket.socket, died: int) -> str:
    """Which file will not change any more; "" if it was the last word, or nobody will say one."""
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(died, select.POLLIN)
    ready = dict(poll.poll())
    message = parent.recv(MAX_MESSAGE_BYTES) if parent.fileno() in ready else b""
    found: str = json.loads(message) if message else ""
    return found


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _say(parent: socket.socket, why: str) -> None:
    try:
        parent.send(why.encode(), socket.MSG_DONTWAIT)
    except OSError:  # nobody is left to hear it
        return


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
