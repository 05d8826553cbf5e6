"""One random word for each place of the order, from which everything random about its sample follows."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.order.permutation import mixed

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)


def place_words(*, seed: int, epoch: int, lane: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The words of the places (lane, row) of an epoch; they depend on nothing else.

    Args:
        seed: The order's seed.
        epoch: Epoch, 0 or more.
        lane: int64 [n].
        row: int64 [n].

    Returns:
        uint64 [n].
    """
    name = hashlib.blake2b(b"draws", digest_size=8)
    name.update(seed.to_bytes(8, "little") + epoch.to_bytes(8, "little"))
    key = np.uint64(int.from_bytes(name.digest(), "little"))
    with np.errstate(over="ignore"):
        return mixed(mixed(lane.astype(np.uint64) * _STEP + key) + row.astype(np.uint64) * _STEP)
