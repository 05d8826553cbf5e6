"""torchdata's StatefulDataLoader, which keeps a state for each of its workers."""

import copy
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import cacheloader as cl
from cacheloader.errors import ConfigError, StateMismatch
from tests.support.draws import Drawn

# torch warns of more workers than cores, of which the machine that runs the tests may have few; torchdata calls
# something that torch is about to drop.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.timeout(300),
]

Opener = Callable[..., cl.RemoteDataset]
Batches = list[list[Drawn]]


def load(dataset: cl.RemoteDataset, num_workers: int = 0, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(
        dataset, batch_size=dataset.batch_size, num_workers=num_workers, collate_fn=list, **options
    )


def flat(batches: Iterable[list[Drawn]]) -> list[Drawn]:
    return [sample for batch in batches for sample in batch]


@pytest.fixture
def opened(open_dataset: Opener) -> Opener:
    return partial(open_dataset, tail="keep")


@pytest.fixture
def epochs(opened: Opener) -> list[Batches]:
    """What an uninterrupted run gets, by our own loader: three epochs of nine batches."""
    loader = cl.DataLoader(opened(), batch_size=4, collate_fn=list)
    return [list(loader) for _ in range(3)]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_the_batches_are_those_of_our_own_loader_epoch_by_epoch(
    opened: Opener, epochs: list[Batches], num_workers: int
) -> None:
    loader = load(opened(), num_workers)
    assert [list(loader) for _ in range(3)] == epochs


@pytest.mark.parametrize("num_workers", [1, 2])
def test_persistent_workers_move_on_from_epoch_to_epoch_and_resume_in_the_second(
    opened: Opener, epochs: list[Batches], num_workers: int
) -> None:
    loader = load(opened(), num_workers, persistent_workers=True)
    assert list(loader) == epochs[0]
    batches = iter(loader)
    taken = [next(batches) for _ in range(4)]
    resumed = load(opened(), num_workers, persistent_workers=True)
    resumed.load_state_dict(loader.state_dict())
    assert taken + list(resumed) == epochs[1]
    assert list(resumed) == epochs[2]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_a_state_of_any_step_resumes_exactly_and_the_next_epoch_follows(
    opened: Opener, epochs: list[Batches], num_workers: int
) -> None:
    loader = load(opened(), num_workers)
    states = [loader.state_dict()]
    states += [loader.state_dict() for _ in loader]
    for step, saved in enumerate(states):
        resumed = load(opened(), num_workers)
        resumed.load_state_dict(saved)
        assert list(resumed) == epochs[0][step:], step
        if step in (0, 4, len(states) - 1):
            assert list(resumed) == epochs[1], step


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_of_a_complete_epoch_resumes_at_the_next(
    opened: Opener, epochs: list[Batches], num_workers: int
) -> None:
    loader = load(opened(), num_workers)
    assert list(loader) == epochs[0]
    resumed = load(opened(), num_workers)
    resumed.load_state_dict(loader.state_dict())
    assert [list(resumed), list(resumed)] == epochs[1:]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_many_lives_in_a_row_deliver_one_sequence(opened: Opener, epochs: list[Batches], num_workers: int) -> None:
    """Save and resume every two or three steps, over three epochs and their edges."""
    saved: dict[str, Any] | None = None
    delivered: Batches = []
    while len(delivered) < sum(map(len, epochs)):
        loader = load(opened(), num_workers)
        if saved is not None:
            loader.load_state_dict(saved)
        batches = iter(loader)
        for _ in range(2 + len(delivered) % 2):
            batch = next(batches, None)
            if batch is not None:
                delivered.append(batch)
            else:
                batches = iter(loader)
        saved = copy.deepcopy(loader.state_dict())
    assert delivered[: sum(map(len, epochs))] == [batch for epoch in epochs for batch in epoch]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_job_can_go_back_in_one_process(opened: Opener, epochs: list[Batches], num_workers: int) -> None:
    loader = load(opened(), num_workers)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    saved = loader.state_dict()
    for _ in range(4):
        next(batches)
    loader.load_state_dict(saved)
    assert list(loader) == epochs[0][3:]
    assert list(loader) == epochs[1]


@pytest.mark.parametrize("every", [2, 4, 100])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_rare_snapshots_resume_exactly(opened: Opener, epochs: list[Batches], num_workers: int, every: int) -> None:
    loader = load(opened(), num_workers, snapshot_every_n_steps=every)
    for step, _ in enumerate(loader, start=1):
        if step in (1, 5, 8):
            resumed = load(opened(), num_workers, snapshot_every_n_steps=every)
            resumed.load_state_dict(loader.state_dict())
            assert list(resumed) == epochs[0][step:]


def test_what_workers_have_read_ahead_is_not_counted(opened: Opener, epochs: list[Batches]) -> None:
    loader = load(opened(), 2, prefetch_factor=4)
    batches = iter(loader)
    taken = [next(batches)]
    resumed = load(opened(), 2, prefetch_factor=1)
    resumed.load_state_dict(loader.state_dict())
    assert taken + list(resumed) == epochs[0]


def test_states_are_small_plain_fresh_and_of_one_size(opened: Opener) -> None:
    loader = load(opened(), 2)
    states = [loader.state_dict()]
    states += [loader.state_dict() for _ in loader]
    sizes = {len(json.dumps(state["_snapshot"]["_worker_snapshots"])) for state in states[2:-2]}
    assert max(sizes) < 4096
    assert max(sizes) - min(sizes) < 16
    iterator = iter(opened())
    first = iterator.state_dict()
    next(iter(first.values()))
    kept = copy.deepcopy(first)
    for _ in range(4):
        next(iterator)
    assert first == kept != iterator.state_dict()
    first["begun"]["order"]["seed"] = 99
    assert iterator.state_dict()["begun"]["order"]["seed"] == 3


def test_states_pass_through_torch_save_without_pickled_code(
    opened: Opener, epochs: list[Batches], tmp_path: Any
) -> None:
    loader = load(opened(), 0)
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    resumed = load(opened(), 0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert list(resumed) == epochs[0][1:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_state_of_one_rank_fits_any_rank_of_any_world_with_the_same_global_batch(
    opened: Opener, num_workers: int
) -> None:
    def world(size: int) -> list[StatefulDataLoader]:
        return [
            load(opened(rank=rank, world_size=size, lanes=4, batch_size=8 // size, tail="drop"), num_workers)
            for rank in range(size)
        ]

    uninterrupted = [flat(step) for step in zip(*world(1), strict=True)]
    before = world(4)
    streams = [iter(loader) for loader in before]
    steps = [[sample for stream in streams for sample in next(stream)] for _ in range(2)]
    saved = before[3].state_dict()
    after = world(2)
    for loader in after:
        loader.load_state_dict(saved)
    steps += [flat(step) for step in zip(*after, strict=True)]
    assert [sorted(step) for step in steps] == [sorted(step) for step in uninterrupted]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_of_another_order_is_refused_with_the_field(opened: Opener, num_workers: int) -> None:
    loader = load(opened(), num_workers)
    next(iter(loader))
    resumed = load(opened(seed=4), num_workers)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatch, match="seed: saved 3, now 4"):
        list(resumed)


def test_another_batch_size_is_refused_where_workers_take_turns_and_fine_where_one_process_reads(
    opened: Opener, epochs: list[Batches]
) -> None:
    for num_workers in (0, 2):
        loader = load(opened(), num_workers)
        next(iter(loader))
        resumed = load(opened(batch_size=8), num_workers)
        resumed.load_state_dict(loader.state_dict())
        if num_workers:
            with pytest.raises(StateMismatch, match="global_batch=4, here it is 8"):
                list(resumed)
        else:
            assert flat(resumed) == flat(epochs[0][1:])


def test_lanes_taken_from_a_state_inside_a_worker_are_refused_since_the_next_epoch_would_lose_them(
    opened: Opener,
) -> None:
    loader = load(opened(rank=0, world_size=4, tail="drop", batch_size=2), 1)
    next(iter(loader))
    resumed = load(opened(rank=0, world_size=2, tail="drop", batch_size=4), 1)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatch, match="pass lanes=4"):
        list(resumed)


def test_a_loader_whose_batches_are_not_the_data_sets_is_told_at_the_first_state(opened: Opener) -> None:
    loader = StatefulDataLoader(opened(batch_size=3), batch_size=4, collate_fn=list)
    next(iter(loader))
    with pytest.raises(ConfigError, match="pass the loader's batch size"):
        loader.state_dict()


def test_plain_positions_stay_available_and_fit_any_worker_count(opened: Opener, epochs: list[Batches]) -> None:
    dataset = opened()
    batches = iter(load(dataset, 2))
    taken = [next(batches) for _ in range(5)]
    other = opened()
    other.load_state_dict(dataset.state_dict(batches=5))
    assert taken + list(load(other, 3)) == epochs[0]
