"""The index of blobs in LMDB.

It holds nothing that a directory listing could not give back, apart from the order of use and the sample counts; so it
is never repaired, only thrown away.

Only the daemon opens it. Every transaction begins and ends within one call and under one lock, since LMDB binds
transactions to threads and a long read keeps old pages alive. ``sync=False`` without ``writemap``: a commit costs
microseconds, a crash of the process loses nothing, and after a power failure the file is not trusted (see
``lifeline``). With ``writemap`` a full disk would kill the process.
"""

from __future__ import annotations

import logging
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import lmdb

from cacheloader_daemon.store.names import BlobName
from cacheloader_daemon.store.trouble import disk_trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

T = TypeVar("T")

MAP_BYTES = 2**30
"""Address space, not memory or disk: enough for five million blobs. It doubles when it is full."""

BATCH_ROWS = 64
"""Rows changed by one transaction at most: each may copy a page, and a full map or disk must still allow deletes."""

MAX_SAMPLE_COUNTS = 2**18
"""Sample counts remembered, also of evicted shards: 16 MB at most."""

_ROW = struct.Struct("<qIqIqq?")
_COUNT = struct.Struct("<qQ")
_TURN = struct.Struct(">Q")


class TableBroken(Exception):
    """The file is no index that can be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is known of one blob.

    Attributes:
        name: Its files.
        used_bytes: What they take on disk.
        accessed_ns: When it was used last, a time stamp that never goes back.
        suspect: Whether it has to be verified before it is used.
    """

    name: BlobName
    used_bytes: int
    accessed_ns: int
    suspect: bool = False


class BlobTable:
    """Rows by key, and sample counts by key. Safe to call from any thread.

    Args:
        env: An open environment, owned by this object.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._lock = threading.Lock()
        self._blobs = env.open_db(b"blobs")
        self._samples = env.open_db(b"samples")
        self._turns = env.open_db(b"sample_turns")

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
                        str(path), map_size=map_bytes, max_dbs=4, mode=0o600, max_readers=16, sync=False,
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

    def rows(self) -> dict[bytes, Row]:
        """A copy of all rows.

        Raises:
            TableBroken: Some of it cannot be read.
        """
        try:
            with self._lock, self._env.begin(db=self._blobs) as txn:
                return {bytes(key): _unpack(bytes(key), value) for key, value in txn.cursor()}
        except (lmdb.Error, struct.error, ValueError) as error:
            raise TableBroken(str(error)) from error

    def get(self, key: bytes) -> Row | None:
        """The row of one blob."""
        with disk_trouble("reading the index", self._env.path()), self._lock, self._env.begin(db=self._blobs) as txn:
            value = txn.get(key)
        return None if value is None else _unpack(key, value)

    def put(self, rows: Iterable[Row]) -> None:
        """Add or replace rows."""
        self._in_batches(list(rows), lambda txn, row: txn.put(row.name.key, _pack(row), db=self._blobs))

    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove rows; one that is not there does not matter."""
        self._in_batches(list(keys), lambda txn, key: txn.delete(key, db=self._blobs))

    def touch(self, accessed_ns: Mapping[bytes, int]) -> None:
        """Set the last use of many blobs; one that is not there does not matter."""

        def touch_one(txn: Any, item: tuple[bytes, int]) -> None:
            value = txn.get(item[0], db=self._blobs)
            if value is not None:
                *fields, _, suspect = _ROW.unpack(value)
                txn.put(item[0], _ROW.pack(*fields, item[1], suspect), db=self._blobs)

        self._in_batches(list(accessed_ns.items()), touch_one)

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

    def _in_batches(self, items: list[T], change: Callable[[Any, T], object]) -> None:
        for start in range(0, len(items), BATCH_ROWS):
            batch = items[start : start + BATCH_ROWS]

            def change_batch(txn: Any, batch: list[T] = batch) -> None:
                for item in batch:
                    change(txn, item)

            self._write(change_batch)

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


def _pack(row: Row) -> bytes:
    name = row.name
    return _ROW.pack(
        name.size_bytes, name.crc32c, name.index_bytes, name.index_crc32c, row.used_bytes, row.accessed_ns, row.suspect
    )


def _unpack(key: bytes, value: bytes) -> Row:
    size_bytes, crc32c, index_bytes, index_crc32c, used_bytes, accessed_ns, suspect = _ROW.unpack(value)
    name = BlobName(key=key, size_bytes=size_bytes, crc32c=crc32c, index_bytes=index_bytes, index_crc32c=index_crc32c)
    return Row(name=name, used_bytes=used_bytes, accessed_ns=accessed_ns, suspect=suspect)
