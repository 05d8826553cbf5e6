from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ConfigError
from cacheloader.order.mixture_pattern import BlockPattern
from cacheloader.order.mixture_schedule import WeightsFrom, normalised, phases_of
from cacheloader.order.mixture_shares import BLOCK_ROWS, Phase, Shares

from .cases import seeds, thorough
from .mixture_cases import Mix, mixes, weightings

counted = st.lists(st.integers(1, 4096), min_size=1, max_size=8).filter(
    lambda parts: min(parts) * BLOCK_ROWS >= sum(parts)
)


def table(shares: Shares, first_block: int, stop_block: int) -> np.ndarray:
    return np.array([shares.before(block) for block in range(first_block, stop_block + 1)])


def shares_of(*weights: float) -> Shares:
    names = "abcdefgh"[: len(weights)]
    return Shares(phases_of(dict(zip(names, weights, strict=True)), [], names=names, lanes=1))


@thorough
@given(counted, st.integers(0, 2**40))
def test_counts_never_drift_one_sample_from_the_exact_share_and_every_block_is_full(parts, block):
    weights = tuple(Fraction(part, sum(parts)) for part in parts)
    shares = Shares([Phase(start_block=0, weights=weights)])
    before, behind = shares.before(block), shares.before(block + 1)

    assert sum(before) == block * BLOCK_ROWS
    assert sum(behind) - sum(before) == BLOCK_ROWS
    for weight, start, stop in zip(weights, before, behind, strict=True):
        assert abs(start - block * BLOCK_ROWS * weight) < 1
        assert start <= stop


@thorough
@given(counted)
def test_no_block_takes_back_a_sample(parts):
    shares = Shares([Phase(start_block=0, weights=tuple(Fraction(part, sum(parts)) for part in parts))])

    assert (np.diff(table(shares, 0, 200), axis=0) >= 0).all()


@pytest.mark.parametrize("weights", [(0.7, 0.3), (7, 3), (Fraction(7, 10), Fraction(3, 10)), (np.float64(0.7), 0.3)])
def test_weights_are_the_decimal_numbers_that_they_are_written_as(weights):
    assert normalised(dict(zip("ab", weights, strict=True)), names="ab") == (Fraction(7, 10), Fraction(3, 10))


def test_ten_blocks_of_seven_tenths_hold_exactly_seven_blocks_of_samples():
    assert shares_of(0.7, 0.3).before(10) == (7 * BLOCK_ROWS, 3 * BLOCK_ROWS)


def test_equal_weights_get_equal_counts():
    assert shares_of(1, 1, 1, 1).before(3) == (3 * 1024,) * 4


@thorough
@given(mixes())
def test_a_change_of_weights_takes_effect_at_its_block_and_counts_go_on(mix: Mix):
    phases = mix.shares.phases
    whole = table(mix.shares, 0, 12)

    assert (np.diff(whole, axis=0).sum(axis=1) == BLOCK_ROWS).all()
    for number, phase in enumerate(phases):
        alone = Shares([Phase(start_block=0, weights=phase.weights)])
        stop = phases[number + 1].start_block if number + 1 < len(phases) else 12
        grown = whole[phase.start_block : stop + 1] - whole[phase.start_block]
        np.testing.assert_array_equal(grown, table(alone, 0, stop - phase.start_block))


def test_a_paused_source_gets_nothing_until_it_is_taken_up_again():
    schedule = [
        WeightsFrom(rows=BLOCK_ROWS, weights={"a": 1, "b": 0}),
        WeightsFrom(rows=2 * BLOCK_ROWS, weights={"a": 1, "b": 1}),
    ]
    shares = Shares(phases_of({"a": 0.3, "b": 0.7}, schedule, names="ab", lanes=1))

    assert np.diff(table(shares, 0, 3), axis=0)[:, 1].tolist() == [2867, 0, 2048]


@thorough
@given(mixes(), st.data())
def test_the_rows_that_surround_a_sample_hold_it(mix: Mix, data):
    source = data.draw(st.integers(0, len(mix.names) - 1))
    row = np.arange(8 * BLOCK_ROWS)
    sources, turn = mix.order.locate(np.full(len(row), mix.lanes - 1), row)
    at = row[sources == source]
    first, stop, near = mix.shares.surround(source, turn[at])

    assert ((first <= at) & (at < stop)).all()
    assert (first >= 0).all()
    assert (stop - first <= 3 * BLOCK_ROWS).all()
    assert ((first <= near + 1) & (near <= stop)).all()


def test_a_sample_of_a_heavy_source_is_known_to_a_few_hundred_rows_and_of_the_lightest_to_three_blocks():
    heavy = Shares([Phase(start_block=0, weights=(Fraction(1, 2), Fraction(1, 2)))])
    light = Shares([Phase(start_block=0, weights=(Fraction(1, BLOCK_ROWS), Fraction(BLOCK_ROWS - 1, BLOCK_ROWS)))])
    turn = np.array([0, 1, 1000, 10**6, 10**12 + 7], dtype=np.int64)
    for shares, most in ((heavy, 560), (light, 3 * BLOCK_ROWS)):
        first, stop, _ = shares.surround(0, turn)
        assert (stop - first <= most).all()
        for number, low, high in zip(turn.tolist(), first.tolist(), stop.tolist(), strict=True):
            assert shares.before(low // BLOCK_ROWS)[0] <= number
            assert number < shares.before(-(-high // BLOCK_ROWS))[0]


@thorough
@given(st.lists(st.integers(0, 4096), min_size=1, max_size=5), seeds, st.integers(0, 2**30), st.integers(0, 2**40))
def test_a_pattern_has_the_counts_and_numbers_each_source_in_order(cuts, seed, lane, block):
    edges = [0, *sorted(cuts), BLOCK_ROWS]
    counts = np.diff(edges)
    pattern = BlockPattern.of(counts, seed=seed, lane=lane, block=block)

    np.testing.assert_array_equal(np.bincount(pattern.source, minlength=len(counts)), counts)
    for source, count in enumerate(counts.tolist()):
        places = np.flatnonzero(pattern.source == source)
        assert (np.diff(places) > 0).all()
        assert pattern.turn[places].tolist() == list(range(count))


def test_lanes_blocks_and_seeds_each_have_a_pattern_of_their_own_and_spread_the_sources():
    patterns = [
        BlockPattern.of([2048, 2048], seed=seed, lane=lane, block=block)
        for seed, lane, block in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4))
    ]

    for other in patterns[1:]:
        assert 0.45 < np.mean(patterns[0].source == other.source) < 0.55
    for pattern in patterns:
        assert all(0.3 < np.mean(part) < 0.7 for part in np.split(pattern.source, 32))


def test_the_pattern_of_a_block_stays_what_it_is_from_release_to_release():
    pattern = BlockPattern.of([1000, 3000, 96], seed=17, lane=3, block=5)

    assert pattern.source[:24].tolist() == GOLDEN_SOURCE
    assert int((pattern.source.astype(np.int64) * np.arange(BLOCK_ROWS)).sum()) == GOLDEN_SUM


GOLDEN_SOURCE = [1, 1, 0, 0, 1, 1, 0, 1, 2, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1]
GOLDEN_SUM = 6494393


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, "name each one"),
        ({"a": 1, "b": 1, "c": 1}, "name each one"),
        ({"a": 1, "b": -0.1}, "'b' is -0.1; pass a number from 0"),
        ({"a": 1, "b": float("nan")}, "'b' is nan"),
        ({"a": 1, "b": True}, "'b' is True"),
        ({"a": 1, "b": "half"}, "'b' is 'half'"),
        ({"a": 0, "b": 0}, "all weights"),
        ({"a": 1, "b": 0.0001}, "less than one sample in a block of 4096; raise it to 0.000244"),
    ],
)
def test_weights_that_cannot_work_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        normalised(weights, names="ab")


@thorough
@given(weightings(3))
def test_only_the_ratios_of_weights_matter(weights):
    exact = normalised(weights, names="abc")

    assert sum(exact) == 1
    assert normalised({name: 3 * Fraction(str(weight)) for name, weight in weights.items()}, names="abc") == exact


@pytest.mark.parametrize(
    ("samples", "lanes", "row"), [(1, 1, 4096), (4096, 1, 4096), (4097, 1, 8192), (32768, 8, 4096)]
)
def test_a_change_at_a_count_of_samples_begins_with_the_next_block_of_rows(samples, lanes, row):
    phases = phases_of(
        {"a": 1, "b": 1}, [WeightsFrom(samples=samples, weights={"a": 1, "b": 2})], names="ab", lanes=lanes
    )

    assert [phase.start_block * BLOCK_ROWS for phase in phases] == [0, row]


def test_two_changes_in_one_block_are_refused():
    schedule = [WeightsFrom(rows=row, weights={"a": 1, "b": row % 10}) for row in (5001, 5002)]
    with pytest.raises(ConfigError, match="two changes of weights take effect at row 8192"):
        phases_of({"a": 1, "b": 1}, schedule, names="ab", lanes=1)


@pytest.mark.parametrize("when", [{}, {"rows": 1, "samples": 1}, {"rows": 0}, {"samples": -1}, {"rows": 1.5}])
def test_a_change_needs_one_point_in_time(when):
    with pytest.raises(ConfigError, match="needs one of the two"):
        WeightsFrom(weights={"a": 1}, **when)
