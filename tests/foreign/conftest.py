from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import cacheloader as cl
from tests.support.draws import key_and_draws
from tests.support.memory_sets import MemorySets

URL = "mem://foreign/"
SHARDS = (7, 0, 11, 5, 9, 3)  # 35 samples


@pytest.fixture(scope="module")
def memory_sets() -> Iterator[MemorySets]:
    with MemorySets().installed() as sets:
        sets.add(URL, SHARDS)
        yield sets


@pytest.fixture
def open_dataset(memory_sets: MemorySets) -> Callable[..., cl.RemoteDataset]:
    """Opens a data set of 35 samples in uneven shards; keyword arguments as ``RemoteDataset`` has them."""
    options: dict[str, Any] = {"seed": 3, "shuffle_window": 2, "batch_size": 4, "transform": key_and_draws}

    return partial(cl.RemoteDataset, URL, **options)
