"""The order once more, told sample by sample in plain Python: slow, and simple enough to be read against the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cacheloader.order.lanes import shard_order
from cacheloader.order.permutation import SORTED_SIZE, large_permutation, raw_words, small_permutation

if TYPE_CHECKING:
    from cacheloader.order.options import OrderOptions


def lane_windows(samples_per_shard: np.ndarray, options: OrderOptions, epoch: int) -> list[list[list[tuple[int, int]]]]:
    """For each lane its windows, for each window its (shard, sample) in the order in which they are read."""
    order = shard_order(len(samples_per_shard), options=options, epoch=epoch)
    stream = [(int(shard), i) for shard in order for i in range(int(samples_per_shard[shard]))]
    quotient, remainder = divmod(len(stream), options.lanes)
    lanes = []
    number = start = 0
    for lane in range(options.lanes):
        stop = start + quotient + (lane < remainder)
        pieces: dict[int, list[tuple[int, int]]] = {}
        for shard, i in stream[start:stop]:
            pieces.setdefault(shard, []).append((shard, i))
        lanes.append(_windows(list(pieces.values()), number, options, epoch))
        number += len(pieces)
        start = stop
    return lanes


def _windows(pieces, number, options, epoch):
    count = len(pieces)
    if not options.shuffle:
        return pieces
    words = raw_words("pieces", options.seed, epoch, start=number, count=count)
    keys = raw_words("windows", options.seed, epoch, start=number, count=count)
    pieces = [pieces[i] for i in np.argsort(words, kind="stable")]
    windows = []
    at, length = 0, 1
    while at < count:
        length = min(length, options.shuffle_window)
        window = [sample for piece in pieces[at : at + length] for sample in piece]
        windows.append([window[i] for i in _permutation(keys[at], len(window))])
        at += length
        length *= 2
    return windows


def _permutation(key: np.uint64, size: int) -> list[int]:
    if size <= SORTED_SIZE:
        return small_permutation(key, size).tolist()
    return large_permutation(
        np.arange(size), window=np.zeros(size, dtype=np.int64), size=np.array([size]), key=np.array([key])
    ).tolist()
