"""Blobs that a power failure, or a lost record of one, put in doubt: verified before they are used, once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Doubts:
    """Safe to call from any thread.

    Args:
        suspects: Keys of blobs in doubt.
        proven_ns: Those whose data file is stamped up to here had reached the disk after all.
    """

    def __init__(self, suspects: Iterable[bytes], *, proven_ns: int) -> None:
        self.proven_ns = proven_ns
        self._guard = threading.Lock()
        self._suspects = set(suspects)
        self._verifying: dict[bytes, threading.Lock] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, key: bytes) -> bool:
        return key in self._suspects

    def drop(self, key: bytes) -> None:
        """The blob is proven, replaced or gone."""
        with self._guard:
            self._suspects.discard(key)

    def settle(self, key: bytes, prove: Callable[[], None]) -> bool:
        """Prove a blob, or wait for whoever is at it; ``prove`` raises if it is damaged. Whether it was proven here.

        Each blob has a lock of its own: to sum one up takes seconds, and nobody shall wait for another's.
        """
        with self._guard:
            lock = self._verifying.setdefault(key, threading.Lock())
        try:
            with lock:
                if key not in self._suspects:
                    return False
                prove()
                self.drop(key)
                return True
        finally:
            with self._guard:
                self._verifying.pop(key, None)
