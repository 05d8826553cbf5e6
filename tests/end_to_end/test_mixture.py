"""Mixtures through a real daemon, real torch workers and real files."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data

import cacheloader as cl
from cacheloader.errors import ConfigError, StateMismatch
from tests.support.cache_meter import CacheMeter
from tests.support.shard_sets import ShardSet, digest, write_shards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# torch warns of more workers than cores; the machine that runs the tests may have few.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SHAPES = {"web": (6, 50), "code": (4, 30), "math": (2, 10)}
WEIGHTS = {"web": 0.6, "code": 0.3, "math": 0.1}


@dataclass(frozen=True, kw_only=True)
class Sets:
    """The data sets of a mixture and the cache that they share."""

    shards: dict[str, ShardSet]
    cache_dir: Path

    def source(self, name: str, **options: Any) -> cl.RemoteDataset:
        defaults: dict[str, Any] = {"seed": 3, "shuffle_window": 2, "cache_dir": self.cache_dir, "cache_size": "64MiB"}
        return cl.RemoteDataset(str(self.shards[name].folder), **(defaults | options))

    def mixture(self, *, source_options: Any = None, weights: Any = None, **options: Any) -> cl.Mixture:
        sources = {
            name: (self.source(name, **(source_options or {}).get(name, {})), weight)
            for name, weight in (weights or WEIGHTS).items()
        }
        defaults: dict[str, Any] = {"seed": 5, "source_field": "__source__", "transform": name_and_digest}
        return cl.Mixture(sources, **(defaults | options))


def name_and_digest(sample: dict[str, Any]) -> tuple[str, str, str]:
    return sample["__source__"], sample["__key__"], digest(sample)


@pytest.fixture(scope="module")
def shard_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ShardSet]:
    return {
        name: write_shards(
            tmp_path_factory.mktemp(name), num_shards=shards, samples_per_shard=samples, sample_bytes=400, seed=shards
        )
        for name, (shards, samples) in SHAPES.items()
    }


@pytest.fixture
def sets(shard_sets: dict[str, ShardSet], cache_dir: Path) -> Sets:
    return Sets(shards=shard_sets, cache_dir=cache_dir)


def loader_of(mixture: cl.Mixture, *, batch_size: int = 20, num_workers: int = 0, **options: Any) -> cl.DataLoader:
    return cl.DataLoader(mixture, batch_size=batch_size, num_workers=num_workers, collate_fn=list, **options)


def epochs(loader: cl.DataLoader, count: int) -> Iterator[list[list[Any]]]:
    for _ in range(count):
        yield list(loader)


def flat(batches: Any) -> list[Any]:
    return [sample for batch in batches for sample in batch]


def test_every_sample_is_unharmed_and_each_source_reads_its_epochs_whole_while_the_mixture_goes_on(
    sets: Sets,
) -> None:
    loader = loader_of(sets.mixture(epoch_samples=1024), num_workers=2)
    samples = flat(batch for epoch in epochs(loader, 4) for batch in epoch)

    assert len(samples) == 4100, "4096 rows, and a last step that is full"
    assert Counter(name for name, *_ in samples[:4096]) == {"web": 2457, "code": 1229, "math": 410}
    for name, shards in sets.shards.items():
        own = [(key, content) for source, key, content in samples if source == name]
        size = len(shards.digests)
        for start in range(0, len(own) - size + 1, size):
            assert dict(own[start : start + size]) == shards.digests


def test_a_cache_that_holds_a_third_of_the_sources_is_enough(cache_dir: Path, tmp_path: Path) -> None:
    shards = {
        name: write_shards(tmp_path / name, num_shards=30, samples_per_shard=100, sample_bytes=400, seed=seed)
        for seed, name in enumerate(("web", "code"))
    }
    index_bytes = 2_300_000
    sets = Sets(shards=shards, cache_dir=cache_dir)
    size = {"cache_size": index_bytes + sum(one.size_bytes for one in shards.values()) // 3}
    mixture = sets.mixture(
        weights={"web": 0.5, "code": 0.5}, epoch_samples=8192, source_options=dict.fromkeys(shards, size)
    )
    with CacheMeter(cache_dir) as meter:
        samples = flat(loader_of(mixture, batch_size=64, num_workers=2))

    assert len(samples) == 8192
    for name, one in shards.items():
        own = [(key, content) for source, key, content in samples if source == name]
        assert dict(own[:3000]) == one.digests
    assert 0 < meter.peak_bytes <= size["cache_size"]


@pytest.mark.timeout(600)  # each epoch starts two Pythons with torch
@pytest.mark.parametrize(("num_workers", "method"), [(1, None), (3, None), (2, "spawn"), (2, "forkserver")])
def test_every_worker_count_and_start_method_gives_the_same_sequence_over_epochs(
    sets: Sets, num_workers: int, method: str | None
) -> None:
    expected = list(epochs(loader_of(sets.mixture(epoch_samples=250)), 3))
    loader = loader_of(sets.mixture(epoch_samples=250), num_workers=num_workers, multiprocessing_context=method)

    assert [len(epoch) for epoch in expected] == [13, 12, 13]
    assert list(epochs(loader, 3)) == expected


def test_persistent_workers_and_torchs_own_loader_go_on_where_a_step_reached_into_the_next_epoch(sets: Sets) -> None:
    expected = list(epochs(loader_of(sets.mixture(epoch_samples=250)), 3))
    kept = loader_of(sets.mixture(epoch_samples=250), num_workers=2, persistent_workers=True)
    theirs = torch.utils.data.DataLoader(
        sets.mixture(epoch_samples=250, batch_size=20), batch_size=20, num_workers=2, collate_fn=list
    )

    assert list(epochs(kept, 3)) == expected
    assert [list(theirs) for _ in range(3)] == expected


def test_ranks_and_the_order_in_which_sources_are_written_down_do_not_change_a_step(sets: Sets) -> None:
    alone = loader_of(sets.mixture(lanes=4), batch_size=48)
    turned = dict(reversed(WEIGHTS.items()))
    ranks = [
        loader_of(sets.mixture(lanes=4, weights=turned, rank=rank, world_size=3), batch_size=16) for rank in range(3)
    ]

    for whole, *parts in zip(alone, *ranks, strict=True):
        assert flat(parts) == whole


@pytest.mark.parametrize("tail", ["carry", "keep"])
def test_a_job_cut_and_resumed_again_and_again_with_other_ranks_workers_and_batches_reads_what_it_would_have(
    sets: Sets, tail: str
) -> None:
    """Lane by lane the rows run on; with a global batch of 60 for all, the steps are equal too."""
    options: dict[str, Any] = {"epoch_samples": 300, "tail": tail}
    straight = loader_of(sets.mixture(lanes=4, **options), batch_size=60)
    expected = [sorted(batch) for epoch in epochs(straight, 5) for batch in epoch]
    state: dict[str, Any] | None = None
    read: list[list[Any]] = []
    for world_size, num_workers, num_steps in ((4, 0, 3), (1, 2, 4), (6, 0, 2), (3, 1, 6), (2, 0, 5)):
        loaders = [
            loader_of(
                sets.mixture(rank=rank, world_size=world_size, **options),
                batch_size=60 // world_size,
                num_workers=num_workers,
            )
            for rank in range(world_size)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        streams = [iter(loader) for loader in loaders]
        for _ in range(num_steps):
            parts = [next(stream, None) for stream in streams]
            if parts[0] is None:  # the epoch is over
                assert not any(parts)
                streams = [iter(loader) for loader in loaders]
                parts = [next(stream) for stream in streams]
            read.append(sorted(flat(parts)))
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))

    assert read == expected[: len(read)]


def test_a_loader_that_keeps_the_iterators_state_goes_on_with_another_batch_size_into_the_next_epoch(
    sets: Sets,
) -> None:
    expected = flat(batch for epoch in epochs(loader_of(sets.mixture(epoch_samples=250)), 3) for batch in epoch)
    first = sets.mixture(epoch_samples=250, batch_size=20)
    before = iter(first)
    taken = [next(before) for _ in range(60)]
    second = sets.mixture(epoch_samples=250, batch_size=7)
    after = iter(second)
    after.load_state_dict(before.state_dict())
    taken += [*after, *second, *second]

    assert len(taken) == 753, "steps of 7 to behind rows 250, 500 and 750"
    assert taken == expected[:753]


def draws(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    numbers = (random.random(), float(np.random.random()), float(torch.rand(())), float(rng.random()))
    return {"__key__": sample["__key__"], "source": sample["__source__"], "of source": numbers}


def more_draws(sample: dict[str, Any], rng: np.random.Generator) -> tuple[Any, ...]:
    return sample["source"], sample["__key__"], *sample["of source"], random.random(), float(rng.random())


def test_draws_of_both_transforms_belong_to_the_place_and_differ_from_each_other(sets: Sets) -> None:
    def loader(num_workers: int, **options: Any) -> cl.DataLoader:
        transforms = {name: {"transform": draws} for name in WEIGHTS}
        mixture = sets.mixture(epoch_samples=100, source_options=transforms, transform=more_draws, **options)
        return loader_of(mixture, num_workers=num_workers)

    plain = loader(0)
    expected = [flat(epoch) for epoch in epochs(plain, 3)]
    resumed = loader(2)
    taken = [flat(epoch) for epoch in epochs(resumed, 1)]
    stream = iter(resumed)
    taken.append(next(stream))
    again = loader(1)
    again.load_state_dict(resumed.state_dict())
    taken[1] += flat(again)
    taken.append(flat(again))

    assert taken == expected
    numbers = [number for epoch in expected for sample in epoch for number in sample[2:]]
    assert len(set(numbers)) == len(numbers)


def test_samples_that_a_transform_leaves_out_shorten_the_batch_and_move_nothing(sets: Sets) -> None:
    def some(sample: dict[str, Any]) -> Any:
        return cl.SKIP if sample["__key__"].endswith("3") else sample

    def fewer(sample: dict[str, Any]) -> Any:
        if sample["__key__"].endswith("7"):
            raise ValueError("seven")
        return name_and_digest(sample)

    options = {name: {"transform": some} for name in WEIGHTS}
    whole = loader_of(sets.mixture())
    thinned = loader_of(sets.mixture(source_options=options, transform=fewer, on_bad_sample="skip"))

    for full, batch in zip(whole, thinned, strict=True):
        assert batch == [sample for sample in full if sample[1][-1] not in "37"]
    keys = [key for epoch in epochs(loader_of(sets.mixture()), 1) for _, key, _ in flat(epoch)]
    assert thinned.num_skipped == sum(key.endswith("3") for key in keys)
    assert thinned.num_bad_samples == sum(key.endswith("7") for key in keys)


def test_nothing_is_added_to_a_sample_unless_asked(sets: Sets) -> None:
    batch = next(iter(loader_of(sets.mixture(source_field=None, transform=None))))

    assert {frozenset(sample) for sample in batch} == {frozenset({"__key__", "bin", "cls", "meta.json"})}


def test_a_source_in_data_set_order_keeps_it(sets: Sets) -> None:
    mixture = sets.mixture(source_options={"code": {"shuffle": False}}, rank=0, world_size=2, epoch_samples=1000)
    other = sets.mixture(source_options={"code": {"shuffle": False}}, rank=1, world_size=2, epoch_samples=1000)
    steps = zip(loader_of(mixture, batch_size=10), loader_of(other, batch_size=10), strict=True)
    keys = [key for step in steps for name, key, _ in flat(step) if name == "code"]

    assert len(keys) > 240
    assert keys[:240] == 2 * list(sets.shards["code"].digests)


def test_weights_change_at_the_stated_row_also_after_a_resume_and_when_they_were_added_ahead(sets: Sets) -> None:
    change = cl.WeightsFrom(samples=4000, weights={"web": 0, "code": 1, "math": 1})
    changed = loader_of(sets.mixture(epoch_samples=8192, schedule=[change]), batch_size=64)
    expected = list(changed)
    names = [name for name, *_ in flat(expected)]
    plain = loader_of(sets.mixture(epoch_samples=8192), batch_size=64)
    stream = iter(plain)
    before = [next(stream) for _ in range(50)]
    resumed = loader_of(sets.mixture(epoch_samples=8192, schedule=[change]), batch_size=64)
    resumed.load_state_dict(plain.state_dict())

    assert Counter(names[4096:]) == {"code": 2048, "math": 2048}
    assert before + list(resumed) == expected


def test_a_change_of_weights_that_lies_behind_the_position_or_was_dropped_is_refused(sets: Sets) -> None:
    change = cl.WeightsFrom(rows=4096, weights={"web": 1, "code": 1, "math": 1})
    plain = loader_of(sets.mixture(epoch_samples=1000), batch_size=500)
    for _ in range(5):
        list(plain)
    with_change = sets.mixture(epoch_samples=1000, schedule=[change])
    with pytest.raises(StateMismatch, match=r"schedule: saved '', now '4096: code=0\.333333 math=0"):
        with_change.load_state_dict(plain.state_dict())
    with pytest.raises(StateMismatch, match=r"schedule: saved '4096: .*', now ''"):
        sets.mixture(epoch_samples=1000).load_state_dict(loader_of(with_change).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": WEIGHTS | {"web": 0.7}}, r"weights: saved 'code=0.3 math=0.1 web=0.6 #\w+', now 'code=0.272727 "),
        ({"weights": {"web": 0.6, "code": 0.3}}, "layout: .*manifest: .*weights: "),
        ({"seed": 6}, "seed: saved 5, now 6"),
        ({"lanes": 2}, "lanes: saved 1, now 2"),
        ({"epoch_samples": 400}, "epoch_rows: saved 440, now 400"),
        ({"tail": "keep"}, "tail: saved 'carry', now 'keep'"),
        (
            {"source_options": {"code": {"shuffle_window": 3}}},
            r"sources: saved 'each\(seed=3 window=2\)', now 'code\(seed=3 window=3\) math\(seed=3 window=2\)",
        ),
        ({"source_options": {"web": {"seed": 4}}}, r"sources: .* web\(seed=4 window=2\)"),
    ],
)
def test_a_position_of_another_mixture_is_refused_with_what_differs(
    sets: Sets, options: dict[str, Any], message: str
) -> None:
    state = loader_of(sets.mixture()).state_dict()
    with pytest.raises(StateMismatch, match=message):
        sets.mixture(**options).load_state_dict(state)


def test_a_source_whose_data_has_changed_is_named(sets: Sets, tmp_path: Path) -> None:
    state = loader_of(sets.mixture()).state_dict()
    other = write_shards(tmp_path / "other", num_shards=4, samples_per_shard=30, sample_bytes=400, seed=99)
    grown = Sets(shards={**sets.shards, "code": other}, cache_dir=sets.cache_dir).mixture()
    with pytest.raises(
        StateMismatch, match=r"manifest: saved 'code=(\w+) (math=\w+ web=\w+)', now 'code=(?!\1)\w+ \2'"
    ):
        grown.load_state_dict(state)


def test_the_position_of_a_single_data_set_does_not_fit_a_mixture(sets: Sets) -> None:
    state = loader_of(sets.mixture()).state_dict()
    with pytest.raises(StateMismatch, match="manifest"):
        sets.source("web").load_state_dict(state)


def test_a_position_is_small_and_plain(sets: Sets, tmp_path: Path) -> None:
    state = loader_of(sets.mixture()).state_dict()
    torch.save(state, tmp_path / "state.pt")

    assert torch.load(tmp_path / "state.pt", weights_only=True) == json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sets: cl.Mixture({}), "no sources"),
        (lambda sets: cl.Mixture({"web": sets.source("web")}), r"pass \(RemoteDataset, weight\)"),
        (lambda sets: sets.mixture(weights={"web": -1}), "'web' is -1"),
        (lambda sets: sets.mixture(tail="drop"), 'pass "carry"'),
        (lambda sets: sets.mixture(epoch_samples=0), "epoch_samples=0"),
        (lambda sets: sets.mixture(seed=-1), "seed=-1"),
        (lambda sets: sets.mixture(lanes=0), "lanes=0"),
        (lambda sets: sets.mixture(lanes=64), "'math' holds 20 samples and the mixture has 64 lanes"),
        (lambda sets: sets.mixture(lanes=2, source_options={"web": {"lanes": 4}}), "the mixture: 2, web: 4"),
        (lambda sets: sets.mixture(lanes=2, source_options={"web": {"shuffle": False}}), "the mixture: 2, web: 1"),
        (lambda sets: sets.mixture(schedule=[cl.WeightsFrom(rows=1, weights={"web": 1})]), "name each one"),
    ],
)
def test_what_cannot_be_mixed_is_refused_at_once(sets: Sets, change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change(sets)


def test_one_data_set_object_cannot_be_two_sources(sets: Sets) -> None:
    source = sets.source("web")
    with pytest.raises(ConfigError, match="'a' and 'b' are one RemoteDataset object"):
        cl.Mixture({"a": (source, 1), "b": (source, 1)})
