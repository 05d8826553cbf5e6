"""What accelerate does with a loader that is passed to ``prepare`` all the same."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState

import cacheloader as cl
from cacheloader.errors import ConfigError

Opener = Callable[..., cl.RemoteDataset]

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate's and torch's advice to each other


@pytest.fixture(autouse=True)
def accelerator() -> Iterator[Accelerator]:
    def forget() -> None:
        for shared in (AcceleratorState, GradientState, PartialState):
            shared._shared_state.clear()

    forget()
    yield Accelerator(cpu=True)
    forget()


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["__key__"].replace("-", ""))


def numbers(loader: Any) -> list[int]:
    return [number for batch in loader for number in batch.tolist()]


def plain(dataset: cl.RemoteDataset, num_workers: int = 0) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dispatch_batches", [True, False])
def test_a_share_that_accelerate_would_deal_out_again_is_refused(
    open_dataset: Opener, num_workers: int, dispatch_batches: bool
) -> None:
    dataset = open_dataset(rank=0, world_size=2, transform=number_of)
    loader = prepare_data_loader(
        plain(dataset, num_workers),
        torch.device("cpu"),
        num_processes=2,
        process_index=0,
        put_on_device=True,
        dispatch_batches=dispatch_batches,
    )
    with pytest.raises(ConfigError, match=r"dealt them to 2 ranks already.*register_for_checkpointing"):
        next(iter(loader))


def test_a_data_set_that_every_rank_reads_whole_may_be_dealt_out(open_dataset: Opener) -> None:
    loaders = [
        prepare_data_loader(
            plain(open_dataset(rank=0, world_size=1, transform=number_of, tail="keep")),
            num_processes=2,
            process_index=rank,
            dispatch_batches=False,
        )
        for rank in range(2)
    ]
    delivered = {number for loader in loaders for number in numbers(loader)}
    assert delivered == set(numbers(plain(open_dataset(transform=number_of, tail="keep"))))


@pytest.mark.parametrize("dispatch_batches", [None, False])
def test_a_prepared_loader_of_a_single_process_delivers_the_epochs(
    open_dataset: Opener, dispatch_batches: bool | None, accelerator: Accelerator
) -> None:
    accelerator.dataloader_config.dispatch_batches = dispatch_batches
    loader = accelerator.prepare(plain(open_dataset(transform=number_of)))
    reference = plain(open_dataset(transform=number_of))
    assert [numbers(loader) for _ in range(3)] == [numbers(reference) for _ in range(3)]


def test_an_epoch_number_of_a_fresh_counter_does_not_take_the_place_of_a_loaded_position(open_dataset: Opener) -> None:
    dataset = open_dataset(transform=number_of)
    saved = dataset.state_dict() | {"epoch": 2, "row": 8}
    dataset.load_state_dict(saved)
    loader = prepare_data_loader(plain(dataset), num_processes=1, process_index=0)
    with pytest.raises(ConfigError, match=r"set_epoch\(0\) would leave the position .* in epoch 2"):
        next(iter(loader))
    loader.set_epoch(2)
    rest, following = numbers(loader), numbers(loader)
    uninterrupted = plain(open_dataset(transform=number_of))
    epochs = [numbers(uninterrupted) for _ in range(4)]
    assert (rest, following) == (epochs[2][8:], epochs[3])
