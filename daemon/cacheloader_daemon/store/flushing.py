"""What is in memory reaches the disk, and the record of it: so that after a power failure little is in doubt."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from cacheloader_daemon.store.lifeline import Phase, Record
from cacheloader_daemon.store.trouble import DiskTrouble, disk_trouble

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader_daemon.store.names import BlobName
    from cacheloader_daemon.store.opening import Opened

log = logging.getLogger(__name__)

MAX_UNWRITTEN = 4096
"""Changed rows kept in memory before they are written, although no flush is due."""


class Flushing:
    """Safe to call from any thread.

    Args:
        parts: The parts of the store.
        path: The cache directory, for messages.
    """

    def __init__(self, parts: Opened, path: str) -> None:
        self._parts = parts
        self._path = path
        self._guard = threading.Lock()
        self._publishing = threading.Lock()
        self._flushing = threading.Lock()
        self._barrier_ns = parts.barrier_ns
        self._unflushed: dict[bytes, BlobName] = {}
        self._everything = parts.all_unflushed

    @property
    def num_unflushed(self) -> int:
        """Blobs that may not have reached the disk."""
        return len(self._parts.residents) if self._everything else len(self._unflushed)

    def publish(self, name: BlobName, give_name: Callable[[int], None]) -> int:
        """Have a blob stamped and named by ``give_name``; returns the stamp.

        A flush does not come in between: it could not find the blob, and would count it as flushed.
        """
        with self._publishing:
            stamp_ns = self._parts.residents.stamp()
            give_name(stamp_ns)
            with self._guard:
                self._unflushed[name.key] = name
        return stamp_ns

    def forget(self, key: bytes) -> None:
        """The blob is gone and need not reach the disk."""
        with self._guard:
            self._unflushed.pop(key, None)

    def write_rows(self) -> None:
        """Write changed rows into the index; a disk that does not take them is logged and tried again."""
        residents = self._parts.residents
        changes = residents.take_changes()
        try:
            self._parts.table.write(changes)
        except DiskTrouble as error:
            residents.give_back(changes)
            log.warning("the index could not be written; what it lacks, the next start finds by name: %s", error)

    def flush(self) -> None:
        """Bring everything published up to now to the disk, with its row.

        Raises:
            DiskTrouble: The disk refuses.
        """
        parts = self._parts
        with self._flushing:
            self.write_rows()
            with self._publishing, self._guard:
                unflushed, self._unflushed = self._unflushed, {}
                stamp_ns, everything = parts.residents.last_stamp_ns, self._everything
            try:
                parts.files.flush(None if everything else unflushed.values())
                parts.table.sync()
                self._note(Phase.RUNNING, stamp_ns)
                self._everything = False
            except OSError:
                with self._guard:
                    self._unflushed = {**unflushed, **self._unflushed}
                raise

    def close(self) -> None:
        """Flush, close the index and note a clean end.

        Raises:
            DiskTrouble: The disk refuses; the next start recovers as after a crash.
        """
        try:
            self.flush()
        finally:
            self._parts.table.close()
        self._note(Phase.CLOSED, self._barrier_ns)

    def _note(self, phase: Phase, barrier_ns: int) -> None:
        doubts = self._parts.doubts
        record = Record(
            boot_id=self._parts.boot_id,
            phase=phase,
            barrier_ns=barrier_ns,
            doubtful=len(doubts) > 0,
            proven_ns=doubts.proven_ns,
        )
        with disk_trouble("noting the state of the cache", self._path):
            self._parts.lifeline.write(record)
        self._barrier_ns = barrier_ns
