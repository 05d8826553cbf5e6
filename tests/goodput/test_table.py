"""Packed columns give back what was put in, however it came."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.goodput import table as tables
from cacheloader.goodput.table import Packed, Table, narrowed

LEAST, MOST = -(2**60), 2**62
NUMBERS = st.one_of(st.integers(0, 3), st.integers(-300, 300), st.integers(LEAST, MOST))


@given(st.lists(NUMBERS, max_size=20))
def test_a_packed_column_is_the_column(values: list[int]) -> None:
    assert Packed.of(np.array(values, dtype=np.int64)).values().tolist() == values


@given(st.lists(st.integers(0, MOST), max_size=20))
def test_narrowed_numbers_are_the_numbers(values: list[int]) -> None:
    assert narrowed(values).tolist() == values


def test_numbers_that_count_up_or_are_all_the_same_take_no_memory() -> None:
    for values in (np.arange(7, 70_000, 3), np.full(70_000, 5)):
        assert Packed.of(values).rest is None
    clock = np.arange(10**18, 10**18 + 70_000 * 60_000_000, 60_000_000)
    clock[35_000:] += 1_000_000  # a save
    packed = Packed.of(clock)
    assert packed.rest is not None
    assert packed.rest.itemsize == 4


@given(st.lists(st.lists(st.tuples(st.integers(0, 40), NUMBERS), max_size=12), max_size=6), st.booleans())
def test_rows_in_any_order_and_any_number_of_times_are_there_once_and_the_first_counts(
    parts: list[list[tuple[int, int]]], in_order: bool
) -> None:
    if in_order:
        parts = [sorted(part) for part in parts]
    table, expected = Table(2), dict[int, int]()
    before = tables.BLOCK_ROWS
    tables.BLOCK_ROWS = 4
    try:
        for part in parts:
            held, rows = table.snapshot(), sorted(expected.items())
            table.add(np.array(part, dtype=np.int64).reshape(-1, 2))
            for number, value in part:
                expected.setdefault(number, value)
            assert [tuple(row) for row in held.rows().tolist()] == rows, "an earlier snapshot has changed"
    finally:
        tables.BLOCK_ROWS = before
    assert [tuple(row) for row in table.rows().tolist()] == sorted(expected.items())
    assert len(table) == len(expected)
