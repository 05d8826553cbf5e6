"""The different values of an array, as ``np.unique`` has them, which imports masked arrays at its first call.

That would be a tenth of a second in a training process with many objects, between the plan and the first request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Integer = TypeVar("_Integer", bound=np.integer)


def distinct(values: NDArray[_Integer]) -> NDArray[_Integer]:
    """The values, sorted, each once."""
    ordered = np.sort(values)
    return ordered[_is_new(ordered)]


def ranked(values: NDArray[_Integer]) -> tuple[NDArray[_Integer], NDArray[np.int64]]:
    """The values, sorted, each once, and where among them each value stands.

    Args:
        values: [n].

    Returns:
        The distinct values, and their indices by value, int64 [n].
    """
    by_value = np.argsort(values, kind="stable")
    ordered = values[by_value]
    is_new = _is_new(ordered)
    rank = np.empty(len(values), dtype=np.int64)
    rank[by_value] = np.cumsum(is_new) - 1
    return ordered[is_new], rank


def _is_new(ordered: NDArray[_Integer]) -> NDArray[np.bool_]:
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return is_new
