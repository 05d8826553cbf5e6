"""Every blob of a directory, in memory: what the daemon answers from, so that a sick index stops nobody."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from cacheloader_daemon.store.records import Resident
from cacheloader_daemon.store.row import NAME_BYTES, Row, pack_state, unpack_many, unpack_row, unpack_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Residents:
    """Rows by key, packed, with what has changed since it was last written down. Safe to call from any thread.

    Args:
        rows: Those that were found at the start.
        last_stamp_ns: No time stamp that is given from now on is as low as this or that of any row.
    """

    def __init__(self, rows: Mapping[bytes, bytes], *, last_stamp_ns: int) -> None:
        self._guard = threading.Lock()
        self._rows = dict(rows)
        self._changed: set[bytes] = set()
        self._used_bytes = 0
        for *_, used_bytes, accessed_ns, _ in unpack_many(self._rows.values()):
            self._used_bytes += used_bytes
            last_stamp_ns = max(last_stamp_ns, accessed_ns)
        self._last_stamp_ns = last_stamp_ns

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    @property
    def used_bytes(self) -> int:
        """What all blobs take on disk, at most."""
        return self._used_bytes

    @property
    def num_changed(self) -> int:
        """Rows that are not written down as they are."""
        return len(self._changed)

    @property
    def last_stamp_ns(self) -> int:
        """The highest time stamp given so far."""
        return self._last_stamp_ns

    def stamp(self) -> int:
        """A time stamp above all earlier ones, whatever the clock does."""
        with self._guard:
            return self._next_stamp()

    def get(self, key: bytes) -> Row | None:
        """The row of one blob."""
        packed = self._rows.get(key)
        return None if packed is None else unpack_row(key, packed)

    def put(self, row: Row) -> None:
        """Add or replace a row."""
        key = row.name.key
        with self._guard:
            old = self._rows.get(key)
            self._used_bytes += row.used_bytes - (0 if old is None else unpack_state(old)[0])
            self._rows[key] = row.pack()
            self._changed.add(key)

    def remove(self, key: bytes) -> bool:
        """Forget a row; whether it was there."""
        with self._guard:
            old = self._rows.pop(key, None)
            if old is None:
                return False
            self._used_bytes -= unpack_state(old)[0]
            self._changed.add(key)
            return True

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that blobs are used now; one that is not there does not matter."""
        with self._guard:
            for key in keys:
                row = self._rows.get(key)
                if row is not None:
                    used_bytes, _, suspect = unpack_state(row)
                    self._rows[key] = row[:NAME_BYTES] + pack_state(
                        used_bytes=used_bytes, accessed_ns=self._next_stamp(), suspect=suspect
                    )
                    self._changed.add(key)

    def all_keys(self) -> list[bytes]:
        """The keys of all blobs at this moment."""
        with self._guard:
            return list(self._rows)

    def in_order(self) -> list[Resident]:
        """All blobs, the one used longest ago first; those whose last use is not known come before all others."""
        with self._guard:
            keys, rows = list(self._rows), list(self._rows.values())
        found = [(row[5], key, row[0], row[4]) for key, row in zip(keys, unpack_many(rows), strict=True)]
        found.sort()
        return [Resident(key, size_bytes, used_bytes, stamp_ns) for stamp_ns, key, size_bytes, used_bytes in found]

    def take_changes(self) -> dict[bytes, bytes | None]:
        """The present rows of what has changed, ``None`` for what is gone; counts as written down from here on."""
        with self._guard:
            changed, self._changed = self._changed, set()
            return {key: self._rows.get(key) for key in changed}

    def give_back(self, changes: Iterable[bytes]) -> None:
        """They could not be written down."""
        with self._guard:
            self._changed.update(changes)

    def _next_stamp(self) -> int:
        self._last_stamp_ns = max(time.time_ns(), self._last_stamp_ns + 1)
        return self._last_stamp_ns
