from __future__ import annotations

import math
import statistics as stdlib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.harness.statistics import median, pairwise_ratio, percentile, spread

values = st.lists(st.floats(min_value=-1e300, max_value=1e300), min_size=1, max_size=50)
rates = st.floats(min_value=1e-3, max_value=1e9)


@given(values)
def test_median_agrees_with_the_standard_library(numbers):
    assert median(numbers) == pytest.approx(stdlib.median(numbers))


@given(values, st.floats(min_value=0, max_value=100))
def test_a_percentile_lies_within_the_values(numbers, percent):
    assert min(numbers) <= percentile(numbers, percent) <= max(numbers)


@given(values, st.floats(min_value=0, max_value=100), st.floats(min_value=0, max_value=100))
def test_percentiles_never_fall(numbers, one, other):
    low, high = sorted((one, other))
    a, b = percentile(numbers, low), percentile(numbers, high)
    assert a <= b or a == pytest.approx(b)


@given(values)
def test_percentile_0_and_100_are_least_and_most(numbers):
    assert percentile(numbers, 0) == min(numbers)
    assert percentile(numbers, 100) == max(numbers)


def test_a_percentile_lies_between_neighbours_in_proportion():
    assert percentile([10.0, 20.0, 30.0], 75) == 25.0


@given(values, st.randoms())
def test_order_of_repeats_does_not_matter(numbers, random):
    shuffled = numbers.copy()
    random.shuffle(shuffled)
    assert spread(shuffled) == spread(numbers)


def test_relative_spread_is_the_range_over_the_median():
    assert spread([8.0, 10.0, 13.0]).relative == 0.5
    assert spread([2.0, 2.0]).relative == 0.0
    assert spread([-1.0, 0.0, 1.0]).relative == math.inf


@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=9), rates)
def test_what_slows_a_whole_round_does_not_change_the_ratio(rounds, factor):
    numerators, denominators = zip(*rounds, strict=True)
    slowed = pairwise_ratio([value * factor for value in numerators], [value * factor for value in denominators])
    assert slowed.median == pytest.approx(pairwise_ratio(numerators, denominators).median)


def test_ratios_are_taken_within_a_round_and_not_between_medians():
    # Medians 2 and 2 would say 1.0; in two of three rounds the first was three times as fast.
    ratio = pairwise_ratio([3.0, 6.0, 2.0], [1.0, 2.0, 4.0])
    assert (ratio.median, ratio.least, ratio.most) == (3.0, 0.5, 3.0)


@given(st.lists(rates, min_size=1, max_size=9))
def test_a_contestant_compared_with_itself_is_1(numbers):
    assume(all(numbers))
    assert pairwise_ratio(numbers, numbers).median == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: percentile([], 50), "no values"),
        (lambda: percentile([1.0], 101), "not between 0 and 100"),
        (lambda: pairwise_ratio([1.0], [1.0, 2.0]), "1 rounds of one contestant and 2"),
        (lambda: pairwise_ratio([1.0], [0.0]), "not above 0"),
    ],
)
def test_figures_that_mean_nothing_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
