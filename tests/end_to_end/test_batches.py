"""However a batch comes to the training loop, by threads or from workers, it is the same batch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

import cacheloader as cl
from cacheloader.ahead import Ahead, Planned, ReadAhead
from cacheloader.errors import CacheloaderError, ConfigError, WorkerLost
from tests.support.node_daemon import is_running
from tests.support.shard_sets import ShardSet, digest, write_shards
from tests.support.signals import dead_workers_told_in_next
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 32

Pair = namedtuple("Pair", "left right")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="session")
def small_set(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """8 shards of 32 samples of 4 kB."""
    return write_shards(tmp_path_factory.mktemp("small"), num_shards=8, samples_per_shard=32, sample_bytes=4000)


@pytest.fixture
def make(small_set: ShardSet, cache_dir: Path) -> Callable[..., cl.DataLoader]:
    def loader(*, dataset: dict[str, Any] | None = None, **options: Any) -> cl.DataLoader:
        defaults = {"seed": 5, "shuffle_window": 2, "cache_dir": cache_dir, "cache_size": "64MiB"}
        read = cl.RemoteDataset(str(small_set.folder), **(defaults | (dataset or {})))
        return cl.DataLoader(read, **({"batch_size": BATCH} | options))

    return loader


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cacheloader-read")]


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """A batch of the default collate function, sample by sample."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


# Read by threads.


@pytest.mark.parametrize("tail", ["drop", "pad", "keep"])
def test_raw_batches_are_the_same_whoever_reads_them(make: Any, small_set: ShardSet, tail: str) -> None:
    options = {"dataset": {"tail": tail}, "batch_size": 24}
    # A collate function keeps the workers; torch's own loader reads without threads.
    expected = list(make(**options, num_workers=2, collate_fn=list))
    alone, threads = make(**options), make(**options, num_workers=3)
    for loader in (alone, threads):
        got = [rows_of(batch) for batch in loader]
        assert got == expected
        assert loader.epoch == 1
    seen = {sample["__key__"]: digest(sample) for batch in expected for sample in batch}
    assert seen.items() <= small_set.digests.items()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_breaks_off_leaves_no_thread_and_goes_on_where_it_was(make: Any, num_workers: int) -> None:
    whole = [batch["__key__"] for batch in make()]
    loader = make(num_workers=num_workers)
    got = []
    for batch in loader:
        got.append(batch["__key__"])
        if len(got) == 3:
            assert reading_threads()
            break
    saved = loader.state_dict()
    gc.collect()
    wait_until(lambda: not reading_threads())
    loader.load_state_dict(saved)
    assert got + [batch["__key__"] for batch in loader] == whole
    wait_until(lambda: not reading_threads())


def test_without_a_transform_workers_are_not_started_and_with_a_collate_function_they_are(make: Any) -> None:
    def num_started(loader: cl.DataLoader) -> int:
        gc.collect()
        before = set(multiprocessing.active_children())  # with what earlier tests may have left
        batches = iter(loader)
        next(batches)
        return len(set(multiprocessing.active_children()) - before)

    assert num_started(make()) == 0
    assert num_started(make(num_workers=2)) == 0
    assert num_started(make(num_workers=2, collate_fn=list)) == 2


def test_an_error_of_a_reading_thread_is_raised_where_its_batch_is_due(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [batch["__key__"] for batch in make()]
    from cacheloader.stretch import Stretch

    read = Stretch.read

    def failing(self: Stretch, batch: int) -> Any:
        samples = read(self, batch)
        if samples[0]["__key__"] == whole[4][0]:
            raise OSError(5, "the disk is broken")
        return samples

    loader = make()
    with monkeypatch.context() as patch:
        patch.setattr(Stretch, "read", failing)
        batches = iter(loader)
        got = [next(batches)["__key__"] for _ in range(4)]
        with pytest.raises(OSError, match="the disk is broken"):
            next(batches)
    assert got == whole[:4]
    loader.load_state_dict(loader.state_dict())
    assert [batch["__key__"] for batch in loader] == whole[4:]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"device": "cpu"}, {"num_workers": 2, "collate_fn": list}])
def test_an_interrupted_next_neither_ends_the_epoch_nor_loses_a_batch(
    make: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    def key(batch: Any) -> str:
        return batch[0]["__key__"] if isinstance(batch, list) else batch["__key__"][0]

    whole = [key(batch) for batch in make()]
    loader = make(**options)
    batches = iter(loader)
    got = [key(next(batches)) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_took", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    with pytest.raises(ConfigError, match="interrupted"):
        next(batches)
    assert loader.epoch == 0
    loader.load_state_dict(loader.state_dict())
    assert got + [key(batch) for batch in loader] == whole
    del batches
    wait_until(lambda: not reading_threads())


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_the_collector_may_end_an_iteration_in_a_thread_of_its_own() -> None:
    class Endless:
        def __init__(self) -> None:
            self.ahead: Ahead | None = None
            self.first_taken = threading.Event()

        def plan(self, rows: Any) -> list[Planned]:
            if rows[0] == 1:  # before there is room for it
                assert self.ahead is not None
                assert self.first_taken.wait(60)
                with self.ahead._has_room:  # the collector asks for no good moment
                    self.ahead.close()
            return [Planned(row=rows[0], num_samples=1, size_bytes=0, read=lambda: rows[0])]

        def advance(self, row: int) -> None:
            pass

    planner = Endless()
    planner.ahead = Ahead(planner, range(9), ReadAhead(num_threads=2, num_batches=1), lambda row, batch: (row, batch))
    assert next(planner.ahead) == (0, 0)
    planner.first_taken.set()
    wait_until(lambda: not reading_threads())


def test_a_process_forked_in_the_middle_of_an_epoch_reads_the_same_epoch_by_itself(make: Any) -> None:
    whole = [batch["__key__"] for batch in make()]
    loader = make(num_workers=2)
    batches = iter(loader)
    got = [next(batches)["__key__"]]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        verdict = b"an error"
        try:
            with pytest.raises(CacheloaderError, match="forked"):
                next(batches)
            del batches
            verdict = b"equal" if [batch["__key__"] for batch in loader] == whole else b"other batches"
        except BaseException:
            verdict = traceback.format_exc().encode()
            raise
        finally:
            os.write(write, verdict)
            os._exit(0)
    os.close(write)
    try:
        # Both move on at the same time, each with a position of its own.
        got += [batch["__key__"] for batch in batches]
        with open(read, "rb") as answer:
            assert answer.read() == b"equal"
    finally:
        os.waitpid(child, 0)
    assert got == whole
    assert loader.epoch == 1


def test_a_mixture_without_transforms_is_read_by_threads_and_its_batches_are_those_of_workers(
    make: Any, small_set: ShardSet, cache_dir: Path
) -> None:
    def mixture() -> cl.Mixture:
        sources = {
            name: (cl.RemoteDataset(str(small_set.folder), seed=seed, cache_dir=cache_dir, cache_size="64MiB"), weight)
            for name, seed, weight in (("a", 1, 3.0), ("b", 2, 1.0))
        }
        # Longer than its sources: shards are needed again behind their first access.
        return cl.Mixture(sources, epoch_samples=600, source_field="from")

    expected = list(cl.DataLoader(mixture(), batch_size=BATCH, num_workers=2, collate_fn=list))
    got = [rows_of(batch) for batch in cl.DataLoader(mixture(), batch_size=BATCH, num_workers=2)]
    assert got == expected


# From workers.


class Odd:
    """Something that no loader knows."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]


def everything(sample: dict[str, Any]) -> dict[str, Any]:
    content = sample["bin"][:2000]
    return {
        "key": sample["__key__"],
        "raw": sample["bin"],
        "short": sample["cls"],
        "array": np.frombuffer(content, dtype=np.uint16).reshape(2, -1).T,
        "image": torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(2, 10, -1).permute(2, 0, 1),
        "half": torch.tensor(3.5, dtype=torch.bfloat16),
        "odd": Odd(sample["__key__"]),
        "nested": [(sample["cls"], {"again": sample["bin"]})],
    }


def plain(value: Any) -> Any:
    """The same with lists in place of arrays, so that batches can be compared."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.float().tolist() if value.dtype == torch.bfloat16 else value.tolist())
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = map(plain, value)
        return type(value)(*parts) if hasattr(value, "_make") else type(value)(parts)
    return value


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_objects_of_every_kind_come_from_workers_as_they_are_made(make: Any, method: str) -> None:
    options = {"dataset": {"transform": everything}, "collate_fn": list, "batch_size": 64}
    expected = [plain(batch) for batch in make(**options)]
    got = [plain(batch) for batch in make(**options, num_workers=2, multiprocessing_context=method)]
    assert got == expected


class Framed:
    """A user's type, which default collation was taught."""

    def __init__(self, image: torch.Tensor) -> None:
        self.image = image


def frame(samples: list[Framed], *, collate_fn_map: Any = None) -> torch.Tensor:
    stacked = collate([sample.image for sample in samples], collate_fn_map=collate_fn_map)
    return torch.flatten(stacked, 1)  # works on a tensor alone


def stackable(sample: dict[str, Any]) -> dict[str, Any]:
    pixels = np.frombuffer(sample["bin"][:1500], dtype=np.uint8).reshape(10, 10, 15).copy()
    return {
        "pixels": pixels,
        "moved": torch.from_numpy(pixels).permute(2, 0, 1),
        "pair": Pair(torch.from_numpy(pixels), np.float32(len(sample["bin"]))),
        "ordered": OrderedDict(key=sample["__key__"], sizes=[pixels[0, 0], 3, 0.5]),
        "half": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "yes": True,
    }


def framed(sample: dict[str, Any]) -> dict[str, Any]:
    return {**stackable(sample), "framed": Framed(torch.tensor(list(sample["bin"][:1000])))}


def strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.stride()
    if isinstance(value, dict):
        return [strides(part) for part in value.values()]
    return [strides(part) for part in value] if isinstance(value, list | tuple) else None


@pytest.mark.parametrize("transform", [stackable, framed])
@pytest.mark.parametrize("keeps", [False, True])
def test_stacks_made_in_a_shared_block_are_those_of_torchs_default_collation(
    make: Any, monkeypatch: pytest.MonkeyPatch, transform: Any, keeps: bool
) -> None:
    monkeypatch.setitem(default_collate_fn_map, Framed, frame)
    kept = []  # 16 × 1500 bytes are a view of the block, fewer would be copied out
    options = {"dataset": {"transform": transform}}
    expected = list(make(**options, batch_size=16))
    for got, wanted in zip(make(**options, batch_size=16, num_workers=2), expected, strict=True):
        assert plain(got) == plain(wanted)
        assert strides(got) == strides(wanted)
        if keeps:  # every block, so that later batches find none that is free
            kept.append(got)


def test_a_worker_says_which_tensors_cannot_be_stacked(make: Any) -> None:
    def ragged(sample: dict[str, Any]) -> torch.Tensor:
        return torch.zeros(1 + int(sample["__key__"][len("sample") :]) % 2, 1000)

    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        list(make(dataset={"transform": ragged}, num_workers=2))


def image_and_label(sample: dict[str, Any]) -> dict[str, Any]:
    number = int(sample["__key__"][len("sample") :])
    return {"image": torch.full((3, 64, 64), number, dtype=torch.int32), "label": number, "raw": sample["bin"]}


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"pin_memory": True}, {"device": "cpu"}])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_a_loop_that_keeps_every_batch_of_two_epochs_finds_each_unharmed(make: Any, options: dict[str, Any]) -> None:
    dataset = {"transform": image_and_label}
    alone, shared = make(dataset=dataset), make(dataset=dataset, num_workers=2, **options)
    kept, expected = [], []
    for _ in range(2):
        kept += list(shared)
        expected += list(alone)
    assert len(kept) == len(expected)
    for got, wanted in zip(kept, expected, strict=True):
        assert torch.equal(got["image"], wanted["image"])
        assert got["label"].tolist() == wanted["label"].tolist()
        assert got["raw"] == wanted["raw"]


def test_persistent_workers_go_on_after_many_breaks_with_batches_under_way(make: Any) -> None:
    loader = make(dataset={"transform": image_and_label}, num_workers=2, persistent_workers=True)
    for epoch in range(6):
        for batch in loader:
            assert int(batch["image"][0, 0, 0, 0]) == int(batch["label"][0])
            break
        assert loader.epoch == epoch
        loader.dataset.set_epoch(epoch + 1)
    blocks = loader._collate.blocks
    assert blocks is not None
    del batch
    expected = make(dataset={"transform": image_and_label})
    expected.dataset.set_epoch(6)
    assert [batch["label"].tolist() for batch in loader] == [batch["label"].tolist() for batch in expected]
    gc.collect()
    assert not blocks._used.any()


def test_a_worker_killed_among_large_batches_is_named_and_the_loader_goes_on(make: Any) -> None:
    dataset = {"transform": image_and_label}
    whole = [batch["label"].tolist() for batch in make(dataset=dataset)]
    loader = make(dataset=dataset, num_workers=2)
    batches = iter(loader)
    taken = [next(batches)["label"].tolist()]
    victim = batches._workers._workers[1].pid
    with dead_workers_told_in_next(), pytest.raises(WorkerLost, match=rf"pid {victim}\) was ended by SIGKILL"):  # noqa: PT012
        os.kill(victim, signal.SIGKILL)
        taken.extend(batch["label"].tolist() for batch in batches)
    loader.load_state_dict(loader.state_dict())
    assert taken + [batch["label"].tolist() for batch in loader] == whole


TRAINER = """
import sys
import cacheloader as cl
from tests.end_to_end.test_batches import image_and_label

def main():
    dataset = cl.RemoteDataset(sys.argv[1], cache_dir=sys.argv[2], cache_size="64MiB", transform=image_and_label)
    loader = cl.DataLoader(dataset, batch_size=32, num_workers=2, multiprocessing_context=sys.argv[3])
    kept = []
    for batch in loader:
        kept.append(batch)
        if len(kept) == 2:
            print(*(worker.pid for worker in loader._under_test._workers._workers), flush=True)
            sys.stdin.read()

original = cl.DataLoader.__iter__
def remembered(self):
    self._under_test = original(self)
    return self._under_test
cl.DataLoader.__iter__ = remembered

if __name__ == "__main__":
    main()
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_training_process_that_is_killed_leaves_no_worker_and_nothing_in_shared_memory(
    small_set: ShardSet, cache_dir: Path, tmp_path: Path, method: str
) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    with subprocess.Popen(
        [sys.executable, script, small_set.folder, cache_dir, method],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    ) as trainer:
        assert trainer.stdout is not None
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(workers) == 2
        trainer.kill()
    # torch's worker looks for its parent every five seconds.
    wait_until(lambda: not any(is_running(pid) for pid in workers), timeout_s=240)
    # Semaphores of torch's queues may stay, as they always did; batches do not. torch names them by who made them, and
    # what another test has there at this moment is not meant.
    ours = tuple(f"torch_{pid}_" for pid in (trainer.pid, *workers))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(ours)]
