"""What resumes at wrong samples elsewhere, and says nothing: here it is refused by name, or the samples are right.

The first nine are known from the strongest library of this kind; each job is cut at a third of its first epoch.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.utils.data

import cacheloader as cl
import cacheloader.state
from cacheloader.errors import ConfigError, StateMismatch
from tests.support.draws import key_and_draws
from tests.support.memory_sets import MemorySets

SHARDS = (40, 25, 60, 35, 50, 30)  # 240 samples
BATCH = 12
CUT = 7
URL = "mem://old/"

# torch warns of more workers than cores, of which the machine that runs the tests may have few.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def sets() -> Iterator[MemorySets]:
    with MemorySets().installed() as sets:
        sets.add(URL, SHARDS)
        sets.add("mem://moved/", SHARDS)
        sets.add("mem://grown/", (*SHARDS, 45, 15))
        sets.add("mem://half/", SHARDS[:3])
        sets.add("mem://other/", (70, 50))
        yield sets


def open_dataset(url: str = URL, **options: Any) -> cl.RemoteDataset:
    return cl.RemoteDataset(url, **({"seed": 1, "shuffle_window": 2} | options))


def open_loader(*args: Any, **options: Any) -> cl.DataLoader:
    return cl.DataLoader(open_dataset(*args, **options), batch_size=BATCH, collate_fn=keys_of)


def keys_of(samples: Sequence[dict[str, Any]]) -> list[str]:
    return [sample["__key__"] for sample in samples]


def flat(batches: Any) -> list[Any]:
    return [sample for batch in batches for sample in batch]


def cut(loader: cl.DataLoader, steps: int = CUT) -> tuple[list[Any], dict[str, Any]]:
    """What ``steps`` batches deliver, and the state behind them."""
    batches = iter(loader)
    return flat(next(batches) for _ in range(steps)), loader.state_dict()


def refused(saved: dict[str, Any], loader: cl.DataLoader, text: str) -> None:
    before = loader.state_dict()
    with pytest.raises(StateMismatch, match=text):
        loader.load_state_dict(saved)
    assert loader.state_dict() == before


def test_1_another_shuffle_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    _, saved = cut(open_loader())
    monkeypatch.setattr(cacheloader.state, "ORDER_VERSION", 2)
    refused(saved, open_loader(), "order_version: saved 1, now 2")


def test_2_another_shuffle_block_size() -> None:
    _, saved = cut(open_loader())
    refused(saved, open_loader(shuffle_window=4), "shuffle_window: saved 2, now 4")


def test_3_shuffling_switched_off() -> None:
    _, saved = cut(open_loader())
    refused(saved, open_loader(shuffle=False), "shuffle: saved True, now False")


def test_4_another_epoch_size() -> None:
    def mixture(**options: Any) -> cl.DataLoader:
        sources = {"a": (open_dataset(), 0.7), "b": (open_dataset("mem://other/"), 0.3)}
        return cl.DataLoader(cl.Mixture(sources, **options), batch_size=BATCH, collate_fn=keys_of)

    _, saved = cut(mixture(epoch_samples=240))
    refused(saved, mixture(epoch_samples=120), "epoch_rows: saved 240, now 120")
    _, saved = cut(open_loader())
    refused(saved, open_loader(tail="keep"), "tail: saved 'drop', now 'keep'")
    refused(saved, open_loader("mem://half/"), "layout: saved '6 shards, 240 samples.*now '3 shards, 125 samples")


def test_5_samples_appended_to_the_data_set() -> None:
    _, saved = cut(open_loader())
    refused(saved, open_loader("mem://grown/"), "layout: saved '6 shards, 240 samples.*now '8 shards, 300 samples")


def test_6_other_weights_sampling_or_batching() -> None:
    def mixture(weight: float) -> cl.DataLoader:
        sources = {"a": (open_dataset(), weight), "b": (open_dataset("mem://other/"), 1 - weight)}
        return cl.DataLoader(cl.Mixture(sources), batch_size=BATCH, collate_fn=keys_of)

    _, saved = cut(mixture(0.7))
    refused(saved, mixture(0.6), r"weights: saved 'a=0\.7 b=0\.3.*now 'a=0\.6 b=0\.4")
    taken, saved = cut(open_loader())
    other = cl.DataLoader(open_dataset(), batch_size=2 * BATCH, collate_fn=keys_of)
    other.load_state_dict(saved)
    rest = flat(other)
    assert taken + rest == flat(open_loader())[: CUT * BATCH + len(rest)]
    assert len(rest) > 240 - CUT * BATCH - 2 * BATCH


@pytest.mark.parametrize("num_workers", [0, 2])
def test_7_a_collate_that_filters_or_packs(num_workers: int) -> None:
    def packed(samples: list[str]) -> list[str]:
        return ["+".join(samples[:5]), *samples[9:]]  # of twelve samples, five become one and four are dropped

    def loader() -> cl.DataLoader:
        dataset = open_dataset(transform=lambda sample: sample["__key__"])
        return cl.DataLoader(dataset, batch_size=BATCH, collate_fn=packed, num_workers=num_workers)

    taken, saved = cut(loader())
    resumed = loader()
    resumed.load_state_dict(saved)
    assert taken + flat(resumed) == flat(loader())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_7_a_transform_that_filters_unevenly_over_ranks(num_workers: int) -> None:
    def even_only(sample: dict[str, Any]) -> Any:
        return sample["__key__"] if int(sample["__key__"][-1]) % 3 else cl.SKIP

    def ranks(size: int) -> list[cl.DataLoader]:
        return [
            cl.DataLoader(
                open_dataset(rank=rank, world_size=size, lanes=2, transform=even_only),
                batch_size=BATCH // size,
                num_workers=num_workers,
                collate_fn=list,
            )
            for rank in range(size)
        ]

    (whole,) = ranks(1)
    before, after = ranks(2), ranks(3)
    streams = [iter(loader) for loader in before]
    delivered = [sample for _ in range(CUT) for stream in streams for sample in next(stream)]
    states = [loader.state_dict() for loader in before]
    assert states[0] == states[1]
    for loader in after:
        loader.load_state_dict(states[0])
    delivered += [sample for loader in after for sample in flat(loader)]
    assert Counter(delivered) == Counter(flat(whole))


@pytest.mark.parametrize(("num_workers", "then"), [(0, 2), (2, 0), (1, 3)])
def test_8_random_augmentation(num_workers: int, then: int) -> None:
    def loader(workers: int) -> cl.DataLoader:
        dataset = open_dataset(transform=key_and_draws)
        return cl.DataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=list)

    taken, saved = cut(loader(num_workers))
    random.seed(5)
    torch.manual_seed(6)
    resumed = loader(then)
    resumed.load_state_dict(saved)
    assert taken + flat(resumed) == flat(loader(0))


def test_9_nodes_of_unequal_size() -> None:
    """A node of eight ranks and one of four, where two of eight had been."""

    def step_sets(size: int, saved: dict[str, Any] | None, steps: int | None) -> tuple[list[Counter[str]], Any]:
        loaders = [
            cl.DataLoader(open_dataset(rank=rank, world_size=size, lanes=16), batch_size=48 // size, collate_fn=keys_of)
            for rank in range(size)
        ]
        for loader in loaders:
            if saved is not None:
                loader.load_state_dict(saved)
        streams = [iter(loader) for loader in loaders]
        taken = []
        for _ in range(len(loaders[0]) if steps is None else steps):
            batches = [next(stream, None) for stream in streams]
            if None in batches:
                break
            taken.append(Counter(flat(batches)))
        return taken, loaders[0].state_dict()

    whole, _ = step_sets(1, None, None)
    before, saved = step_sets(16, None, 2)
    after, _ = step_sets(12, saved, None)
    assert before + after == whole


def test_a_loader_whose_batch_is_not_the_data_sets_is_not_left_alone() -> None:
    """Elsewhere: the same samples in another order and one batch more."""
    dataset = open_dataset(rank=0, world_size=2)
    with pytest.raises(ConfigError, match="pass batch_size="):
        next(iter(torch.utils.data.DataLoader(dataset, batch_size=BATCH)))
    assert cl.DataLoader(dataset, batch_size=BATCH).batch_size == dataset.batch_size == BATCH


def test_a_grown_data_set_begins_with_the_next_epoch_where_the_old_one_ends() -> None:
    """docs/resume.md: finish the epoch with the shards it began with, then accept the new ones."""
    accept = {"manifest": "accept", "layout": "accept"}
    taken, saved = cut(open_loader())
    rest = open_loader()
    rest.load_state_dict(saved)
    assert Counter(taken + flat(rest)) == Counter(flat(open_loader()))
    edge = rest.state_dict()
    assert (edge["epoch"], edge["row"]) == (1, 0)
    grown = open_loader("mem://grown/")
    grown.load_state_dict(edge, on_mismatch=accept)
    assert grown.epoch == 1
    delivered = flat(grown)
    assert len(delivered) == len(set(delivered)) == 300


def test_a_grown_data_set_can_redo_the_epoch() -> None:
    _, saved = cut(open_loader())
    grown = open_loader("mem://grown/")
    grown.load_state_dict(saved, on_mismatch={"manifest": "accept", "layout": "restart_epoch"})
    assert grown.epoch == 0
    assert len(set(flat(grown))) == 300


def test_shards_that_have_moved_go_on_at_the_very_sample() -> None:
    taken, saved = cut(open_loader())
    refused(saved, open_loader("mem://moved/"), r"order of samples \(manifest: saved '\w+', now '\w+'\);")
    moved = open_loader("mem://moved/")
    moved.load_state_dict(saved, on_mismatch={"manifest": "accept"})
    assert taken + flat(moved) == flat(open_loader())


def test_a_manifest_that_was_accepted_does_not_let_another_layout_through() -> None:
    _, saved = cut(open_loader())
    with pytest.raises(StateMismatch, match="layout: saved"):
        open_loader("mem://grown/").load_state_dict(saved, on_mismatch={"manifest": "accept"})
