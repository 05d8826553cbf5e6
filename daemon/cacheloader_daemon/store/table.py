"""The index of blobs in LMDB.

It holds nothing that a directory listing could not give back, apart from the order of use and the sample counts; so it
is never repaired, only thrown away. The daemon reads it once, at the start; what a write could not bring here, the next
start finds by its name.

Only the daemon opens it. Every transaction begins and ends within one call and under one lock, since LMDB binds
transactions to threads and a long read keeps old pages alive. ``sync=False`` without ``writemap``: a commit costs
microseconds, a crash of the process loses nothing, and after a power failure the file is not trusted (see
``lifeline``). With ``writemap`` a full disk would kill the process.
"""

from __future__ import annotations

import logging
import struct
import threading
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self

import lmdb

from cacheloader_daemon.store.row import ROW_BYTES
from cacheloader_daemon.store.trouble import disk_trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

MAP_BYTES = 2**30
"""Address space, not memory or disk: enough for five million blobs. It doubles when it is full."""

BATCH_ROWS = 64
"""Rows changed by one transaction at most: each may copy a page, and a full map or disk must still allow deletes."""

MAX_SAMPLE_COUNTS = 2**18
"""Sample counts remembered, also of evicted shards: 16 MB at most."""

LAYOUT = b"1"
"""Raised with each change of what a row means; an index of another layout is thrown away."""

_LAYOUT_KEY = b"layout"
_COUNT = struct.Struct("<qQ")
_TURN = struct.Struct(">Q")


class TableBroken(Exception):
    """The file is no index that can be trusted."""


class BlobTable:
    """Packed rows by key, and sample counts by key. Safe to call from any thread.

    Args:
        env: An open environment, owned by this object.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._lock = threading.Lock()
        self._blobs = env.open_db(b"blobs")
        self._samples = env.open_db(b"samples")
        self._turns = env.open_db(b"sample_turns")
        self._refuse_other_layout(env.open_db(b"about"))

    @classmethod
    def open(cls, path: Path, *, map_bytes: int = MAP_BYTES) -> Self:
        """The table in the directory ``path``, made if it is missing.

        Raises:
            TableBroken: What is there cannot be trusted.
            DiskTrouble: The disk does not take a new one.
        """
        env: Any = None
        try:
            with disk_trouble("opening the index", str(path)):
                try:
                    env = lmdb.open(
                        str(path), map_size=map_bytes, max_dbs=5, mode=0o600, max_readers=16, sync=False,
                        metasync=False, writemap=False, readahead=False, meminit=False,
                    )  # fmt: skip
                    _refuse_truncated(env, path)
                    env.reader_check()
                    return cls(env)
                except (
                    lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError, lmdb.PageNotFoundError,
                    lmdb.IncompatibleError, lmdb.PanicError, lmdb.ProblemError,
                ) as error:  # fmt: skip
                    raise TableBroken(str(error)) from error
        except BaseException:
            if env is not None:
                env.close()
            raise

    def rows(self) -> dict[bytes, bytes]:
        """A copy of all rows.

        Raises:
            TableBroken: Some of it cannot be read.
        """
        try:
            with self._lock, self._env.begin(db=self._blobs) as txn:
                rows = dict(txn.cursor())
        except lmdb.Error as error:
            raise TableBroken(str(error)) from error
        if any(len(row) != ROW_BYTES for row in rows.values()):
            raise TableBroken(f"it holds rows that are not of {ROW_BYTES} bytes")
        return rows

    def write(self, changes: Mapping[bytes, bytes | None], *, batch_rows: int = BATCH_ROWS) -> None:
        """Put rows, and delete those that are ``None``; a row to delete that is not there does not matter.

        Args:
            changes: By key.
            batch_rows: Rows of one transaction at most.

        Raises:
            DiskTrouble: The disk does not take it; some of the changes may be there.
        """
        items = sorted(changes.items(), key=itemgetter(0))  # neighbours lie in one page
        for start in range(0, len(items), batch_rows):
            batch = items[start : start + batch_rows]

            def change(txn: Any, batch: list[tuple[bytes, bytes | None]] = batch) -> None:
                for key, row in batch:
                    if row is None:
                        txn.delete(key, db=self._blobs)
                    else:
                        txn.put(key, row, db=self._blobs)

            self._write(change)

    def remember_samples(self, key: bytes, num_samples: int) -> None:
        """Keep a sample count; the counts remembered longest ago give way."""

        def remember(txn: Any) -> None:
            old = txn.get(key, db=self._samples)
            if old is not None:
                count, turn = _COUNT.unpack(old)
                if count == num_samples:
                    return
                txn.delete(_TURN.pack(turn), db=self._turns)
            with txn.cursor(db=self._turns) as cursor:
                turn = _TURN.unpack(cursor.key())[0] + 1 if cursor.last() else 0
            txn.put(key, _COUNT.pack(num_samples, turn), db=self._samples)
            txn.put(_TURN.pack(turn), key, db=self._turns)
            surplus = txn.stat(self._samples)["entries"] - MAX_SAMPLE_COUNTS
            with txn.cursor(db=self._turns) as cursor:
                for _ in range(min(surplus, BATCH_ROWS)):
                    cursor.first()
                    txn.delete(cursor.value(), db=self._samples)
                    cursor.delete()

        self._write(remember)

    def samples(self, key: bytes) -> int | None:
        """The sample count of a shard, ``None`` if it is not remembered."""
        with disk_trouble("reading the index", self._env.path()), self._lock, self._env.begin(db=self._samples) as txn:
            value = txn.get(key)
        return None if value is None else int(_COUNT.unpack(value)[0])

    def sync(self) -> None:
        """Bring everything written so far to the disk."""
        with disk_trouble("syncing the index", self._env.path()):
            self._env.sync(True)  # noqa: FBT003 - it takes no name

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        with self._lock:
            self._env.close()

    def _refuse_other_layout(self, about: Any) -> None:
        with self._env.begin(write=True) as txn:
            found = txn.get(_LAYOUT_KEY, db=about)
            if found is None:
                txn.put(_LAYOUT_KEY, LAYOUT, db=about)
        if found is not None and bytes(found) != LAYOUT:
            raise TableBroken(f"it has layout {bytes(found)!r} and this version {LAYOUT!r}")

    def _write(self, change: Callable[[Any], None]) -> None:
        with disk_trouble("writing the index", self._env.path()), self._lock:
            while True:
                try:
                    with self._env.begin(write=True) as txn:
                        change(txn)
                except lmdb.MapFullError:
                    # Allowed only without a transaction, which the lock guarantees.
                    map_bytes = 2 * self._env.info()["map_size"]
                    log.info("the index grows to %d bytes of address space", map_bytes)
                    self._env.set_mapsize(map_bytes)
                else:
                    return


def _refuse_truncated(env: Any, path: Path) -> None:
    # Reading a page behind the end of the mapped file would kill the process with SIGBUS.
    needed_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size_bytes = (path / "data.mdb").stat().st_size
    if 0 < size_bytes < needed_bytes and env.info()["last_txnid"] > 0:
        raise TableBroken(f"the file ends at byte {size_bytes} of {needed_bytes}")
