"""The arrays of a plan, there and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ProtocolError
from cacheloader.protocol.plans import BYTES_PER_ACCESS, Accesses

CLOCKS = st.integers(-(2**63), 2**63 - 1)
ROWS = st.lists(st.tuples(CLOCKS, CLOCKS, st.integers(-(2**31), 2**31 - 1)))


def accesses(rows: list[tuple[int, int, int]]) -> Accesses:
    first, stop, shard = zip(*rows, strict=True) if rows else ((), (), ())
    return Accesses(
        first_clock=np.array(first, dtype=np.int64),
        stop_clock=np.array(stop, dtype=np.int64),
        shard=np.array(shard, dtype=np.int32),
    )


@given(rows=ROWS)
def test_what_comes_back_is_what_was_said(rows: list[tuple[int, int, int]]) -> None:
    said = accesses(rows)
    block = said.to_bytes()
    assert len(block) == len(rows) * BYTES_PER_ACCESS
    heard = Accesses.from_buffer(block, len(rows))
    for column in ("first_clock", "stop_clock", "shard"):
        assert getattr(heard, column).tolist() == getattr(said, column).tolist()
        assert getattr(heard, column).dtype == getattr(said, column).dtype


def test_the_layout_is_the_documented_one() -> None:
    assert accesses([(1, 2, 3), (4, 5, 6)]).to_bytes() == np.array([1, 4, 2, 5], "<i8").tobytes() + bytes(
        [3, 0, 0, 0, 6, 0, 0, 0]
    )


@pytest.mark.parametrize(("size_bytes", "num_accesses"), [(20, 2), (21, 1), (0, 1), (20, 0), (20, -1)])
def test_another_length_is_refused(size_bytes: int, num_accesses: int) -> None:
    with pytest.raises(ProtocolError, match=f"a plan of {num_accesses} accesses takes"):
        Accesses.from_buffer(bytes(size_bytes), num_accesses)
