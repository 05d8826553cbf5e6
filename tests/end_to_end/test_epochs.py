"""Whole epochs through a real daemon, real torch workers and real files."""

import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

import cacheloader as cl
from cacheloader.config import TransportOptions
from cacheloader.errors import ConfigError, QuotaTooSmall, StateMismatch
from cacheloader.transport.control import read_status, stop_daemon
from cacheloader.transport.reporting import FetchReporter
from tests.support.cache_meter import CacheMeter
from tests.support.shard_sets import ShardSet, key_and_digest, write_shards
from tests.support.waiting import wait_until

BATCH = 32

# torch warns of more workers than cores; the machine that runs the tests may have few.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def open_dataset(shard_set: ShardSet, cache_dir: Path, **options: Any) -> cl.RemoteDataset:
    defaults: dict[str, Any] = {
        "seed": 5,
        "shuffle_window": 2,
        "tail": "keep",
        "cache_dir": cache_dir,
        "cache_size": "64MiB",
        "transform": key_and_digest,
    }
    return cl.RemoteDataset(str(shard_set.folder), **(defaults | options))


def open_loader(dataset: cl.RemoteDataset, *, num_workers: int = 2, **options: Any) -> cl.DataLoader:
    return cl.DataLoader(dataset, batch_size=BATCH, num_workers=num_workers, collate_fn=list, **options)


def keys(batches: Any) -> list[str]:
    return [key for batch in batches for key, _ in batch]


@pytest.mark.parametrize("quota", ["the whole data set", "half of it", "two windows"])
def test_every_sample_arrives_unharmed_over_two_shuffled_epochs_and_the_quota_is_kept(
    shard_set: ShardSet, cache_dir: Path, quota: str
) -> None:
    windows_bytes = 2 * 2 * shard_set.shard_bytes
    cache_bytes = {
        "the whole data set": shard_set.size_bytes,
        "half of it": shard_set.size_bytes // 2,
        "two windows": windows_bytes,
    }[quota]
    loader = open_loader(open_dataset(shard_set, cache_dir, cache_size=cache_bytes))
    with CacheMeter(cache_dir) as meter:
        epochs = [[pair for batch in loader for pair in batch] for _ in range(2)]
    for epoch in epochs:
        assert dict(epoch) == shard_set.digests
        assert len(epoch) == len(shard_set.digests)
    assert [key for key, _ in epochs[0]] != [key for key, _ in epochs[1]]
    assert meter.num_looks > 10
    assert 0 < meter.peak_bytes <= cache_bytes


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_start_method_and_worker_count_gives_the_same_sequence(
    shard_set: ShardSet, cache_dir: Path, method: str
) -> None:
    expected = keys(open_loader(open_dataset(shard_set, cache_dir), num_workers=0))
    loader = open_loader(open_dataset(shard_set, cache_dir), num_workers=2, multiprocessing_context=method)
    assert keys(loader) == expected


def test_persistent_workers_move_on_to_the_next_epoch(shard_set: ShardSet, cache_dir: Path) -> None:
    plain = open_loader(open_dataset(shard_set, cache_dir), num_workers=0)
    kept = open_loader(open_dataset(shard_set, cache_dir), num_workers=2, persistent_workers=True)
    for _ in range(3):
        assert keys(kept) == keys(plain)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_torchs_own_loader_delivers_the_same_batches_epoch_by_epoch(
    shard_set: ShardSet, cache_dir: Path, num_workers: int
) -> None:
    ours = open_loader(open_dataset(shard_set, cache_dir), num_workers=2)
    theirs = torch.utils.data.DataLoader(
        open_dataset(shard_set, cache_dir, batch_size=BATCH),
        batch_size=BATCH,
        num_workers=num_workers,
        collate_fn=list,
    )
    for _ in range(2):
        assert list(theirs) == list(ours)


def test_two_ranks_together_deliver_each_sample_once(shard_set: ShardSet, cache_dir: Path) -> None:
    loaders = [
        open_loader(open_dataset(shard_set, cache_dir, rank=rank, world_size=2, lanes=2), num_workers=1)
        for rank in range(2)
    ]
    delivered = Counter(key for loader in loaders for key in keys(loader))
    assert delivered == Counter(list(shard_set.digests))


@pytest.mark.parametrize(("world", "next_world", "next_workers"), [(2, 4, 0), (4, 1, 2), (1, 2, 1)])
def test_a_job_resumes_in_mid_epoch_with_other_ranks_and_workers(
    shard_set: ShardSet, cache_dir: Path, world: int, next_world: int, next_workers: int
) -> None:
    """Three steps on ``world`` ranks, then the rest of the epoch on ``next_world``."""

    def loaders(ranks: int, workers: int) -> list[cl.DataLoader]:
        return [
            cl.DataLoader(
                open_dataset(shard_set, cache_dir, rank=rank, world_size=ranks, transform=None),
                batch_size=64 // ranks,
                num_workers=workers,
                collate_fn=lambda samples: [sample["__key__"] for sample in samples],
            )
            for rank in range(ranks)
        ]

    before = loaders(world, 0)
    streams = [iter(loader) for loader in before]
    delivered = [key for _ in range(3) for stream in streams for key in next(stream)]
    states = [loader.state_dict() for loader in before]
    assert all(state == states[0] for state in states)
    after = loaders(next_world, next_workers)
    for loader in after:
        loader.load_state_dict(states[0])
    delivered += [key for loader in after for batch in loader for key in batch]
    assert Counter(delivered) == Counter(list(shard_set.digests))


def test_a_position_of_another_order_is_refused(shard_set: ShardSet, cache_dir: Path) -> None:
    state = open_loader(open_dataset(shard_set, cache_dir)).state_dict()
    with pytest.raises(StateMismatch, match="seed: saved 5, now 6"):
        open_loader(open_dataset(shard_set, cache_dir, seed=6)).load_state_dict(state)


def test_state_counts_delivered_batches_not_prefetched_ones(shard_set: ShardSet, cache_dir: Path) -> None:
    loader = open_loader(open_dataset(shard_set, cache_dir), num_workers=2, prefetch_factor=4)
    whole = keys(open_loader(open_dataset(shard_set, cache_dir), num_workers=0))
    batches = iter(loader)
    taken = [key for _ in range(5) for key, _ in next(batches)]
    resumed = open_loader(open_dataset(shard_set, cache_dir), num_workers=1)
    resumed.load_state_dict(loader.state_dict())
    assert taken + keys(resumed) == whole


def test_a_break_leaves_the_epoch_and_an_untouched_iterator_does_not(shard_set: ShardSet, cache_dir: Path) -> None:
    loader = open_loader(open_dataset(shard_set, cache_dir), num_workers=0)
    reference = open_loader(open_dataset(shard_set, cache_dir), num_workers=0)
    first, second = keys(reference), keys(reference)
    iter(loader)
    assert loader.epoch == 0
    for batch in loader:
        assert [key for key, _ in batch] == first[:BATCH]
        break
    assert loader.epoch == 0
    assert keys(loader) == second
    assert loader.epoch == 2


def test_fetch_seconds_of_each_batch_are_visible(shard_set: ShardSet, cache_dir: Path) -> None:
    loader = open_loader(open_dataset(shard_set, cache_dir))
    waits = [loader.last_fetch_seconds for _ in loader]
    assert len(waits) == len(loader)
    assert all(wait > 0 for wait in waits)


def test_a_killed_daemon_is_not_noticed_by_the_loop_and_its_cache_is_warm_again(
    shard_set: ShardSet, cache_dir: Path
) -> None:
    loader = open_loader(open_dataset(shard_set, cache_dir), num_workers=2)
    delivered: list[str] = []
    killed: list[int] = []
    for step, batch in enumerate(loader):
        delivered += [key for key, _ in batch]
        if step in (2, 9):
            wait_until(lambda: daemon_pid(cache_dir) not in (0, *killed))  # the next one has begun
            killed.append(daemon_pid(cache_dir))
            os.kill(killed[-1], signal.SIGKILL)
    assert len(killed) == 2
    assert delivered == keys(open_loader(open_dataset(shard_set, cache_dir), num_workers=0))


def daemon_pid(cache_dir: Path) -> int:
    """0 while one is about to write down who it is."""
    return int((cache_dir / "daemon.lock").read_text().partition(" ")[0].strip() or 0)


def test_columns_restrict_what_is_read(shard_set: ShardSet, cache_dir: Path) -> None:
    dataset = open_dataset(shard_set, cache_dir, columns=["cls"], transform=None)
    assert {frozenset(sample) for sample in dataset} == {frozenset({"__key__", "cls"})}


def test_padding_is_marked_and_every_rank_is_full(shard_set: ShardSet, cache_dir: Path) -> None:
    loaders = [
        cl.DataLoader(
            open_dataset(shard_set, cache_dir, tail="pad", rank=rank, world_size=3, transform=None),
            batch_size=10,
            collate_fn=list,
        )
        for rank in range(3)
    ]
    epochs = [list(loader) for loader in loaders]
    assert {len(batch) for epoch in epochs for batch in epoch} == {10}
    assert len({len(epoch) for epoch in epochs}) == 1
    fresh = [s["__key__"] for epoch in epochs for batch in epoch for s in batch if not s["__pad__"]]
    assert Counter(fresh) == Counter(list(shard_set.digests))


def test_waiting_times_of_every_batch_reach_the_daemon(
    shard_set: ShardSet, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FetchReporter, "PATIENCE_S", 60.0)  # a report is dropped where the daemon is busy for longer
    loader = open_loader(open_dataset(shard_set, cache_dir), num_workers=1)
    num_batches = sum(1 for _ in loader)

    def account() -> tuple[int, int]:
        told = read_status(TransportOptions(cache_dir=cache_dir), timeout_s=60)["account"]
        return told["samples"], sum(told["batch_wait_s"]["counts"])

    wait_until(lambda: account()[0] >= len(shard_set.digests), timeout_s=60)
    assert account() == (len(shard_set.digests), num_batches)


def test_a_second_thread_on_one_data_set_is_told_so_at_once(shard_set: ShardSet, cache_dir: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    dataset = open_dataset(shard_set, cache_dir)
    source = dataset._source
    reading = iter(dataset)
    next(reading)

    def read_slowly() -> None:
        with source._by_one_thread(source._shelf):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    assert entered.wait(60)
    with pytest.raises(ConfigError, match="two threads"):
        list(reading)
    leave.set()
    thread.join(60)


def test_a_new_job_sees_what_was_written_a_moment_ago(tmp_path: Path, cache_dir: Path) -> None:
    folder = tmp_path / "train"
    for seed in range(3):
        written = write_shards(folder, num_shards=2, samples_per_shard=8, seed=seed)
        dataset = cl.RemoteDataset(str(folder), cache_dir=cache_dir, cache_size="64MiB", transform=key_and_digest)
        assert dict(dataset) == written.digests


def test_a_directory_that_was_read_without_a_daemon_can_become_a_cache(shard_set: ShardSet, cache_dir: Path) -> None:
    assert len(list(open_dataset(shard_set, cache_dir, daemon="none"))) == len(shard_set.digests)
    assert len(list(open_dataset(shard_set, cache_dir))) == len(shard_set.digests)


def test_a_quota_that_was_accepted_serves_every_later_epoch(shard_set: ShardSet, cache_dir: Path) -> None:
    with pytest.raises(QuotaTooSmall) as refused:
        next(iter(open_dataset(shard_set, cache_dir, cache_size="3MiB")))
    stop_daemon(cache_dir, timeout_s=60)
    smallest = int(re.search(r"at least (\d+) bytes", str(refused.value))[1])  # type: ignore[index]
    loader = open_loader(open_dataset(shard_set, cache_dir, cache_size=smallest))
    for _ in range(4):
        assert sorted(keys(loader)) == sorted(shard_set.digests)
