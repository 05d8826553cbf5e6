"""Random words and keyed permutations that no release of numpy can change.

Of numpy's random streams only the raw words of a bit generator are promised to stay what they are, so nothing here
calls a ``Generator``. Shards are permuted by sorting raw words of Philox, a counter-based generator: word ``i`` is had
without the words before it.

The samples of a window are permuted in one of two ways. A small window is sorted by keyed words, which makes each of
its permutations equally likely. A large one is never laid out: a Feistel network computes where a single place goes,
so that a window of eight million samples, or a thousand windows at once, cost a batch no more than its own samples.
The network works on a rectangle of sides near the square root of the size, adding to each coordinate in turn a keyed
hash of the other; what falls into the part of the rectangle beyond the size walks on until it is inside. Four rounds
leave correlations between places that share a coordinate which a test of 400,000 keys can see, six leave none; it
runs eight.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SORTED_SIZE = 1024
"""Windows of at most this many samples are sorted, larger ones are computed. Part of the order: see ORDER_VERSION."""

ROUNDS = 8
"""Even, so that both coordinates come out on their own side. Part of the order."""

_WORDS_PER_COUNT = 4
_STEP = np.uint64(0x9E3779B97F4A7C15)
_ROUND_NUMBER = np.arange(1, ROUNDS + 1, dtype=np.uint64)
_SORT_NUMBER = np.arange(1, SORTED_SIZE + 1, dtype=np.uint64)
_HASH_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_ONE = np.uint64(1)


def raw_words(purpose: str, *numbers: int, count: int, start: int = 0) -> NDArray[np.uint64]:
    """Words ``[start, start + count)`` of the random stream named by ``purpose`` and ``numbers``.

    Args:
        purpose: What the words are for; equal numbers give unrelated streams for two purposes.
        numbers: Such as seed and epoch, each in ``[0, 2**64)``.
        count: How many words.
        start: Which word comes first; costs nothing.

    Returns:
        uint64 [count].
    """
    name = hashlib.blake2b(purpose.encode(), digest_size=16)
    for number in numbers:
        name.update(number.to_bytes(8, "little"))
    key = np.frombuffer(name.digest(), dtype="<u8").astype(np.uint64)
    skipped = start % _WORDS_PER_COUNT
    words: NDArray[np.uint64] = np.random.Philox(key=key, counter=start // _WORDS_PER_COUNT).random_raw(skipped + count)
    return words[skipped:]


def sorting_permutation(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The permutation that sorts ``words``; equal words keep their order.

    Returns:
        int64 [n].
    """
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def small_permutation(key: np.uint64, size: int) -> NDArray[np.uint16]:
    """The whole permutation of a window of at most ``SORTED_SIZE`` samples.

    Returns:
        uint16 [size]: what lies at each place.
    """
    words = mixed(_SORT_NUMBER[:size] * _STEP + key)
    return np.argsort(words, kind="stable").astype(np.uint16)


def large_permutation(
    place: NDArray[np.int64], *, window: NDArray[np.int64], size: NDArray[np.int64], key: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """What lies at single places of windows of any size. O(places), whatever the sizes.

    Args:
        place: int64 [n], each in ``[0, size[window])``.
        window: int64 [n]; index into ``size`` and ``key``.
        size: int64 [w]; samples of each window, 1 or more.
        key: uint64 [w]; one word for each window.

    Returns:
        int64 [n]; over all places of one window, each of ``[0, size)`` once.
    """
    limits = size.astype(np.uint64)
    # IEEE demands that sqrt is rounded correctly, so this is the same everywhere; any nearby side would do as well.
    heights = np.sqrt(limits.astype(np.float64)).astype(np.uint64)
    widths = (limits + heights - _ONE) // heights
    round_keys = mixed(_ROUND_NUMBER[:, None] * _STEP + key)
    result = _network(place.astype(np.uint64), heights[window], widths[window], round_keys[:, window])
    outside = np.flatnonzero(result >= limits[window])
    while outside.size:
        at = window[outside]
        result[outside] = _network(result[outside], heights[at], widths[at], round_keys[:, at])
        outside = outside[result[outside] >= limits[at]]
    return result.astype(np.int64)


def _network(
    place: NDArray[np.uint64], height: NDArray[np.uint64], width: NDArray[np.uint64], round_keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    moved = place // width
    other = place - moved * width
    for number, key in enumerate(round_keys):
        side = height if number % 2 == 0 else width
        shift = other + key
        shift *= _STEP
        shift ^= shift >> _HALF
        shift *= _HASH_FACTOR
        # The upper half of the hash as a fraction of one, times the side.
        shift >>= _HALF
        shift *= side
        shift >>= _HALF
        moved += shift
        # Modulo the side: both terms are below it, and below zero an unsigned number is huge.
        np.subtract(moved, side, out=shift)
        np.minimum(moved, shift, out=moved)
        moved, other = other, moved
    return moved * width + other


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection on 64 bits in which every bit of the result depends on every bit given (SplitMix64's last step)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
