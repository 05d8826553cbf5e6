"""Whole numbers in columns of as few bytes as they need: a run has millions of steps, and most of them say the same.

A column is stored as differences from its least value or from row to row, whichever is narrower; equal ones take none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_ROWS = 2**16
"""Rows that are stored together; appending a few stores no more than so many anew."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One column of 64-bit numbers.

    Attributes:
        size: How many.
        first: Added to all: the least value or, of steps, the value before the first row.
        step: Added once more for each row, 0 where values are no steps.
        rest: What is left to add, as narrow as it can be; ``None``: nothing.
        is_steps: Whether ``rest`` has to be summed up.
    """

    size: int
    first: int
    step: int
    rest: np.ndarray | None
    is_steps: bool

    @classmethod
    def of(cls, values: np.ndarray) -> Self:
        """Of an array of 64-bit integers whose differences fit 63 bits."""
        if not len(values):
            return cls(0, 0, 0, None, is_steps=False)
        least = int(values.min())
        plain = _narrow(values - least)
        if plain is None or len(values) == 1:
            return cls(len(values), least, 0, plain, is_steps=False)
        steps = np.diff(values)
        least_step = int(steps.min())
        rest = _narrow(steps - least_step)
        if rest is None or rest.itemsize < plain.itemsize:
            return cls(len(values), int(values[0]), least_step, rest, is_steps=True)
        return cls(len(values), least, 0, plain, is_steps=False)

    def values(self) -> np.ndarray:
        """The column, an array of its own."""
        if not self.is_steps:
            found = np.full(self.size, self.first, dtype=np.int64)
            if self.rest is not None:
                found += self.rest.astype(np.int64)
            return found
        found = np.empty(self.size, dtype=np.int64)
        found[0] = self.first
        found[1:] = self.step
        if self.rest is not None:
            found[1:] += self.rest.astype(np.int64)
        np.cumsum(found, out=found)
        return found


@dataclass(slots=True)
class Table:
    """Rows whose first column increases, so that each is there once.

    Attributes:
        num_columns: Columns of each row.
    """

    num_columns: int
    _blocks: list[tuple[Packed, ...]] = field(default_factory=list)
    _num_rows: int = 0
    _last: int = np.iinfo(np.int64).min

    @classmethod
    def of(cls, rows: np.ndarray) -> Self:
        """Of rows in any order; of those with an equal first number the first counts."""
        table = cls(rows.shape[1])
        table.add(rows)
        return table

    def snapshot(self) -> Table:
        """What is in it now, whatever is added later."""
        return Table(self.num_columns, list(self._blocks), self._num_rows, self._last)

    def __len__(self) -> int:
        return self._num_rows

    def column(self, index: int) -> np.ndarray:
        """One column, an array of its own."""
        parts = [block[index].values() for block in self._blocks]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def rows(self) -> np.ndarray:
        """All of it, an array of its own."""
        return np.stack([self.column(index) for index in range(self.num_columns)], axis=1)

    def add(self, rows: np.ndarray) -> None:
        """Take rows in any order; one whose first number is there already changes nothing."""
        if not len(rows):
            return
        if rows[0, 0] <= self._last or not (np.diff(rows[:, 0]) > 0).all():
            rows = np.concatenate([self.rows(), rows])
            rows = rows[np.unique(rows[:, 0], return_index=True)[1]]
            self._blocks.clear()
            self._num_rows = 0
        elif self._blocks and self._blocks[-1][0].size < BLOCK_ROWS:
            last = self._blocks.pop()
            self._num_rows -= last[0].size
            rows = np.concatenate([np.stack([column.values() for column in last], axis=1), rows])
        for begin in range(0, len(rows), BLOCK_ROWS):
            self._blocks.append(_packed(rows[begin : begin + BLOCK_ROWS]))
        self._num_rows += len(rows)
        self._last = int(rows[-1, 0])


def _packed(rows: np.ndarray) -> tuple[Packed, ...]:
    return tuple(Packed.of(np.ascontiguousarray(rows[:, index])) for index in range(rows.shape[1]))


def _narrow(values: np.ndarray) -> np.ndarray | None:
    """Numbers from 0 on in the narrowest type; ``None`` if they are all 0."""
    most = int(values.max())
    return values.astype(np.min_scalar_type(most)) if most else None


def narrowed(values: np.ndarray | Sequence[int]) -> np.ndarray:
    """Numbers from 0 on in the narrowest type."""
    found = np.asarray(values, dtype=np.int64)
    narrow = _narrow(found) if len(found) else None
    return np.zeros(len(found), dtype=np.uint8) if narrow is None else narrow
