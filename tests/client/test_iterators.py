"""Iterators of a data set and the epochs that they stand for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cacheloader as cl
from cacheloader.errors import ConfigError, StateMismatch
from tests.support.memory_sets import MemorySets

URL = "mem://iterators/"


@pytest.fixture(scope="module", autouse=True)
def shards() -> Iterator[None]:
    with MemorySets().installed() as sets:
        sets.add(URL, (7, 9, 4))
        yield


def open_dataset(**options: Any) -> cl.RemoteDataset:
    return cl.RemoteDataset(URL, **({"batch_size": 4, "tail": "keep"} | options))


def keys(samples: Any) -> list[str]:
    return [sample["__key__"] for sample in samples]


def test_an_iterator_that_is_never_read_takes_no_epoch() -> None:
    dataset, reference = open_dataset(), open_dataset()
    iter(dataset)
    assert dataset.epoch == 0
    assert keys(dataset) == keys(reference)


def test_an_iterator_left_behind_does_not_take_the_shards_of_the_next_one() -> None:
    dataset, reference = open_dataset(), open_dataset()
    first = iter(dataset)
    taken = next(first)
    second = iter(dataset)
    head = next(second)
    del first
    assert [keys([taken]), keys([head, *second])] == [keys(reference)[:1], keys(reference)]


def test_a_position_between_the_samples_of_a_batch_is_refused() -> None:
    samples = iter(open_dataset())
    next(samples)
    with pytest.raises(ConfigError, match="after 1 of 4 samples of a batch"):
        samples.state_dict()


def test_an_iterator_goes_on_where_another_one_stood_also_in_another_process_life() -> None:
    samples, reference = iter(open_dataset()), keys(open_dataset())
    for _ in range(8):
        next(samples)
    other = iter(open_dataset())
    other.load_state_dict(samples.state_dict())
    assert keys(other) == reference[8:]


@pytest.mark.parametrize("damage", [{"version": 9}, {"more": 1}, {"worker": 1}, {"num_workers": 2}])
def test_what_is_no_state_of_this_iterator_is_refused(damage: dict[str, int]) -> None:
    with pytest.raises(StateMismatch):
        iter(open_dataset()).load_state_dict(iter(open_dataset()).state_dict() | damage)


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_and_refuses_to_leave_it() -> None:
    dataset, reference = open_dataset(), open_dataset()
    dataset.load_state_dict(dataset.state_dict() | {"epoch": 1, "row": 8})
    with pytest.raises(ConfigError, match="would leave the position"):
        dataset.set_epoch(0)
    dataset.set_epoch(1)
    keys(reference)
    assert keys(dataset) == keys(reference)[8:]
    dataset.set_epoch(0)
    assert keys(dataset) == keys(open_dataset())


def test_iterating_draws_nothing_from_the_global_generators() -> None:
    """A resumed job begins one iteration more than one that never stopped, and its dropout has to draw the same."""
    for num_workers in (0, 1):
        loader = cl.DataLoader(open_dataset(batch_size=None), batch_size=4, num_workers=num_workers)
        torch.manual_seed(5)
        before = torch.get_rng_state()
        list(loader)
        assert torch.equal(torch.get_rng_state(), before)
