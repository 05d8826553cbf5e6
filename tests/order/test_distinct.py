"""Distinct values are those that numpy finds, without what numpy imports for it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.order.distinct import distinct, ranked


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)))
def test_distinct_values_are_those_of_numpy(numbers: list[int]) -> None:
    values = np.array(numbers, dtype=np.int64)
    expected, inverse = np.unique(values, return_inverse=True)
    found, rank = ranked(values)
    assert found.tolist() == expected.tolist()
    assert rank.tolist() == inverse.tolist()
    assert distinct(values).tolist() == expected.tolist()


def test_locating_batches_imports_no_masked_arrays() -> None:
    program = """
import sys
import numpy as np
from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder
from cacheloader.source import Source

order = SampleOrder(np.array([300, 5, 2000, 40]), OrderOptions(seed=1, lanes=1, shuffle=True, shuffle_window=2))
places, edges = order.batches(epoch=0, rows=[0, 64, 128], global_batch=64, rank=0, world_size=1)

class Shelf:
    def holds(self, shard):
        return shard == 0

Source.num_at_hand(None, Shelf(), places.shard, edges)
print("numpy.ma" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110, check=True)
    assert ended.stdout.split() == ["False"]
