from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.order.permutation import (
    SORTED_SIZE,
    large_permutation,
    raw_words,
    small_permutation,
    sorting_permutation,
)

from .cases import thorough

KEYS = st.integers(0, 2**64 - 1).map(np.uint64)


def whole_large_permutation(key: int, size: int) -> np.ndarray:
    window = np.zeros(size, dtype=np.int64)
    return large_permutation(
        np.arange(size), window=window, size=np.array([size]), key=np.array([key], dtype=np.uint64)
    )


def places_of(places: list[int], size: int, keys: np.ndarray) -> list[np.ndarray]:
    """Where each place goes under each key: int64 [keys] for each place."""
    window = np.arange(len(keys))
    sizes = np.full(len(keys), size)
    return [large_permutation(np.full(len(keys), place), window=window, size=sizes, key=keys) for place in places]


def deviation(values: np.ndarray, cells: int) -> float:
    """How far the counts of ``values`` are from even, in standard deviations of chi squared."""
    expected = len(values) / cells
    chi = ((np.bincount(values, minlength=cells) - expected) ** 2 / expected).sum()
    return float(abs(chi - (cells - 1)) / np.sqrt(2 * (cells - 1)))


@thorough
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 9))
def test_any_stretch_of_a_stream_is_had_without_the_words_before_it(start, count, epoch):
    whole = raw_words("test", 7, epoch, count=start + count)

    np.testing.assert_array_equal(raw_words("test", 7, epoch, start=start, count=count), whole[start:])


def test_streams_differ_by_purpose_and_by_each_number():
    words = [
        tuple(raw_words(purpose, *numbers, count=2).tolist())
        for purpose, numbers in (("a", (1, 2)), ("b", (1, 2)), ("a", (2, 1)), ("a", (1, 3)), ("a", (1,)))
    ]

    assert len(set(words)) == 5


def test_equal_words_keep_their_order():
    assert sorting_permutation(np.array([3, 1, 3, 1], dtype=np.uint64)).tolist() == [1, 3, 0, 2]


@thorough
@given(KEYS, st.integers(1, SORTED_SIZE))
def test_small_windows_are_permuted(key, size):
    assert sorted(small_permutation(key, size).tolist()) == list(range(size))


@thorough
@given(KEYS, st.integers(1, 5000))
def test_large_windows_are_permuted_whatever_their_size(key, size):
    assert sorted(whole_large_permutation(key, size).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 1023, 1024, 1025, 1_000_000])
def test_large_permutation_covers_sizes_around_squares_and_a_million(size):
    np.testing.assert_array_equal(np.sort(whole_large_permutation(99, size)), np.arange(size))


@thorough
@given(st.lists(st.tuples(KEYS, st.integers(1, 2**62)), min_size=1, max_size=5), st.data())
def test_places_of_several_windows_at_once_go_where_each_alone_would(windows, data):
    key = np.array([key for key, _ in windows], dtype=np.uint64)
    size = np.array([size for _, size in windows])
    which = np.array(data.draw(st.lists(st.integers(0, len(windows) - 1), min_size=1, max_size=20)))
    place = np.array([data.draw(st.integers(0, windows[i][1] - 1)) for i in which])

    together = large_permutation(place, window=which, size=size, key=key)

    assert (together >= 0).all()
    assert (together < size[which]).all()
    for i, at in enumerate(which):
        zero = np.zeros(1, dtype=np.int64)
        alone = large_permutation(place[i : i + 1], window=zero, size=size[at : at + 1], key=key[at : at + 1])
        assert alone[0] == together[i]


@pytest.mark.parametrize("size", [1025, 1089, 4999])
def test_computed_permutations_favour_no_place_and_no_pair_of_places(size):
    """The keys are fixed, so this is no game of chance. Four rounds instead of eight fail it by far."""
    keys = raw_words("quality", size, count=100_000)
    width = -(-size // int(np.sqrt(size)))
    for first, second in ((0, 1), (3, 3 + width), (0, size // 2), (size - 2, size - 1)):
        one, two = places_of([first, second], size, keys)
        assert deviation(one, size) < 4
        assert deviation((two - one) % size - 1, size - 1) < 4
        # Both places together, on a grid whose cells hold equally many places.
        inside = (one < 1024) & (two < 1024)
        assert deviation(one[inside] // 32 * 32 + two[inside] // 32, 1024) < 7


def test_every_permutation_of_a_tiny_window_is_equally_likely():
    keys = raw_words("quality", 4, count=24_000)
    codes = [int(small_permutation(key, 4).astype(np.int64) @ [64, 16, 4, 1]) for key in keys]

    _, numbered = np.unique(codes, return_inverse=True)
    assert deviation(numbered, 24) < 4
