"""What the last daemon on this directory left behind: did it finish, and has the machine restarted since?

The record has a fixed length and is written over the old one, so that a full disk cannot keep a daemon from
noting that it has begun. A torn or missing record counts as the worst that may have happened.
"""

from __future__ import annotations

import logging
import os
from enum import Enum
from pathlib import Path

import google_crc32c
import msgspec

log = logging.getLogger(__name__)

FILE_NAME = "state"
_RECORD_BYTES = 512
"""One sector, which a disk writes as a whole."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Phase(Enum):
    """What a daemon was last known to be doing."""

    OPENING = "opening"
    RUNNING = "running"
    CLOSED = "closed"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One note.

    Attributes:
        boot_id: The machine's boot during which it was written.
        phase: What the daemon was doing.
        barrier_ns: Files stamped up to here had reached the disk.
        doubtful: Whether some blobs had not been verified since an unclean boot.
        proven_ns: Then, files stamped up to here are not in doubt.
    """

    boot_id: str
    phase: Phase
    barrier_ns: int
    doubtful: bool
    proven_ns: int = -1


def current_boot_id() -> str:
    """What names the time since the machine was started."""
    return _BOOT_ID.read_text().strip()


class Lifeline:
    """The record in the cache directory.

    Args:
        dir_fd: The cache directory; stays open while this is used.
    """

    def __init__(self, dir_fd: int) -> None:
        self._dir_fd = dir_fd

    def read(self) -> Record | None:
        """The last note, ``None`` if there is none that can be read."""
        try:
            fd = os.open(FILE_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._dir_fd)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("the record of the last start cannot be read (%s); every blob will be verified", error)
            return None
        try:
            block = os.read(fd, _RECORD_BYTES)
        finally:
            os.close(fd)
        if len(block) != _RECORD_BYTES or int.from_bytes(block[:4], "little") != google_crc32c.value(block[4:]):
            log.warning("the record of the last start is damaged; every blob will be verified before it is used")
            return None
        try:
            return msgspec.json.decode(block[4:].rstrip(b"\0"), type=Record)
        except msgspec.MsgspecError:
            log.warning("the record of the last start is not of this version; every blob will be verified")
            return None

    def write(self, record: Record) -> None:
        """Replace the note; it has reached the disk when this returns."""
        text = msgspec.json.encode(record).ljust(_RECORD_BYTES - 4, b"\0")
        block = google_crc32c.value(text).to_bytes(4, "little") + text
        assert len(block) == _RECORD_BYTES, f"a record of {len(block)} bytes"
        fd = os.open(FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._dir_fd)
        try:
            os.pwrite(fd, block, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
