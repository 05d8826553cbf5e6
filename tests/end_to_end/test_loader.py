"""The loader and what befalls its processes: signals, dead workers, abandoned iterations, positions at every edge."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cacheloader as cl
from cacheloader.errors import CacheloaderError, ConfigError, WorkerLost
from tests.support.descriptors import open_fds
from tests.support.node_daemon import is_running
from tests.support.shard_sets import ShardSet, key_and_digest
from tests.support.signals import dead_workers_told_in_next, handled_in_next
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH = 32

# torch warns of more workers than cores, and that there is no accelerator to pin memory for.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture
def make(shard_set: ShardSet, cache_dir: Path) -> Callable[..., cl.DataLoader]:
    """Makes loaders of equal data sets; ``dataset`` holds options of the data set."""

    def loader(*, dataset: dict[str, Any] | None = None, num_workers: int = 0, **options: Any) -> cl.DataLoader:
        defaults = {"seed": 5, "shuffle_window": 2, "cache_dir": cache_dir, "cache_size": "64MiB"}
        read = cl.RemoteDataset(str(shard_set.folder), **(defaults | {"transform": key_and_digest} | (dataset or {})))
        options = {"batch_size": BATCH, "collate_fn": list} | options
        return cl.DataLoader(read, num_workers=num_workers, **options)

    return loader


def keys(batches: Any) -> list[str]:
    return [key for batch in batches for key, _ in batch]


def take(batches: Iterator[Any], count: int) -> list[str]:
    return [key for _ in range(count) for key, _ in next(batches)]


def workers_of_this_process() -> list[int]:
    """Forked by torch in this test; the daemon and other helpers are started with a command line of their own."""
    own = Path("/proc/self/cmdline").read_bytes()
    found = []
    for pid in map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if is_running(pid) and Path(f"/proc/{pid}/cmdline").read_bytes() == own:
                found.append(pid)
    return found


def workers_of(batches: Any) -> list[int]:
    """Of one iteration, in the order of their numbers."""
    return [worker.pid for worker in batches._workers._workers]


@contextmanager
def handled(number: signal.Signals, handler: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


# Signals.


def test_a_handler_of_sigterm_saves_the_position_while_workers_live(make: Any) -> None:
    whole = keys(make())
    loader = make(num_workers=2)
    batches = iter(loader)
    saved: list[dict[str, Any]] = []
    with handled(signal.SIGTERM, lambda *_: saved.append(loader.state_dict())):
        taken = take(batches, 5)
        assert [is_running(pid) for pid in workers_of(batches)] == [True, True]
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: len(saved) == 1)
        later = take(batches, 1)
    resumed = make(num_workers=1)
    resumed.load_state_dict(saved[0])
    rest = keys(resumed)
    assert taken + rest == whole
    assert rest[:BATCH] == later


def test_the_position_can_be_saved_when_the_signal_has_ended_the_workers(make: Any) -> None:
    whole = keys(make())
    loader = make(num_workers=2)
    batches = iter(loader)
    taken = take(batches, 5)
    workers = workers_of(batches)
    # As a batch system does that signals the whole job. torch tells of it wherever the main thread is.
    with pytest.raises(RuntimeError, match="worker"):
        kill_and_go_on(workers[0], signal.SIGTERM, batches, taken)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert taken + keys(resumed) == whole


# Dead workers.


@dataclass(frozen=True)
class EndAt:
    """A transform that ends its process at one sample."""

    key: str
    how: str

    def __call__(self, sample: dict[str, Any]) -> tuple[str, str]:
        if sample["__key__"] == self.key:
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        return key_and_digest(sample)


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize(
    ("how", "told"),
    [("kill", ("was ended by SIGKILL", "out of memory")), ("exit", ("exited with status 3", "the transform"))],
    ids=["kill", "exit"],
)
def test_a_dead_worker_is_named_at_once_with_what_it_was_reading(
    make: Any, how: str, told: tuple[str, str], is_persistent: bool
) -> None:
    whole = keys(make())
    end = EndAt(key=whole[5 * BATCH], how=how)
    loader = make(num_workers=2, prefetch_factor=1, dataset={"transform": end}, persistent_workers=is_persistent)
    batches = iter(loader)
    taken = take(batches, 3)
    where = rf"worker 1 of 2 \(pid \d+\) {told[0]} .* row {5 * BATCH} of epoch 0 from \S+shard-0000\d\d.tar.* {told[1]}"
    begin = time.monotonic()
    with dead_workers_told_in_next(), pytest.raises(WorkerLost, match=where):
        take_all(batches, taken)
    assert time.monotonic() - begin < 60
    assert taken == whole[: len(taken)]
    assert loader.state_dict()["row"] == len(taken)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="worker"):
        take_all(iter(loader), taken)


@pytest.mark.parametrize("is_persistent", [False, True])
def test_after_a_worker_was_killed_the_same_loader_goes_on_where_it_was(make: Any, is_persistent: bool) -> None:
    whole = keys(make())
    loader = make(num_workers=2, persistent_workers=is_persistent)
    batches = iter(loader)
    taken = take(batches, 3)
    victim = workers_of(batches)[1]
    with pytest.raises(RuntimeError, match=f"pid {victim}"):
        kill_and_go_on(victim, signal.SIGKILL, batches, taken)
    loader.load_state_dict(loader.state_dict())
    assert taken + keys(loader) == whole


def kill_and_go_on(pid: int, how: signal.Signals, batches: Iterator[Any], taken: list[str]) -> None:
    """Whatever is raised wherever it is: what ``next`` has returned is in ``taken``."""
    got: list[Any] = []
    try:
        os.kill(pid, how)
        got.extend(batches)  # in one call: no handler can raise between two lines and lose the batch of the first
    finally:
        taken += keys(got)


def fail_at_640(sample: dict[str, Any]) -> tuple[str, str]:
    if sample["__key__"] == "sample0000640" and not os.environ.get("CACHELOADER_TEST_MENDED"):
        raise RuntimeError("DataLoader worker (pid of no one) said the transform")
    return key_and_digest(sample)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iteration_that_failed_cannot_go_on_as_if_nothing_was(
    make: Any, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = keys(make())
    loader = make(num_workers=num_workers, dataset={"transform": fail_at_640})
    batches = iter(loader)
    taken: list[str] = []
    with pytest.raises(RuntimeError, match="said the transform", check=lambda error: type(error) is RuntimeError):
        take_all(batches, taken)
    with pytest.raises(ConfigError, match="has failed"):
        next(batches)
    monkeypatch.setenv("CACHELOADER_TEST_MENDED", "1")
    loader.load_state_dict(loader.state_dict())
    assert taken + keys(loader) == whole


def take_all(batches: Iterator[Any], taken: list[str]) -> None:
    for batch in batches:
        taken += keys([batch])


# Abandoned iterations.


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("num_workers", "is_persistent"), [(0, False), (1, False), (1, True)])
def test_a_hundred_breaks_leave_neither_processes_nor_descriptors(
    make: Any, num_workers: int, is_persistent: bool
) -> None:
    loader = make(num_workers=num_workers, persistent_workers=is_persistent)

    def break_early() -> None:
        for _ in loader:
            break

    break_early()
    held = open_fds()
    for _ in range(100):
        break_early()
    # torch's queue of a worker closes its pipe in a thread of its own, a moment after the break. One connection may
    # have come since, which the thread that reports has opened.
    wait_until(lambda: open_fds() <= held + 1)
    assert len(workers_of_this_process()) == (1 if is_persistent else 0)
    assert loader.epoch == 100
    assert loader.state_dict()["row"] == BATCH


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_older_iterator_cannot_move_the_position_of_a_newer_one(make: Any, num_workers: int) -> None:
    loader = make(num_workers=num_workers)
    older = iter(loader)
    take(older, 2)
    newer = iter(loader)
    first = take(newer, 1)
    with pytest.raises(ConfigError, match="another iteration has begun"):
        next(older)
    state = loader.state_dict()
    assert (state["epoch"], state["row"]) == (1, BATCH)
    reference = make()
    reference.load_state_dict(state | {"row": 0})
    assert first + take(newer, 1) == take(iter(reference), 2)


def wait_a_moment(worker: int) -> None:
    if worker == 1:
        time.sleep(0.7)  # a slow start, as a worker on a loaded node has


def test_a_worker_that_is_late_joins_the_iteration_it_was_made_for(make: Any) -> None:
    """The owner breaks off and resumes elsewhere before the second worker of the first iteration has begun."""
    whole = keys(make())
    loader = make(num_workers=2, worker_init_fn=wait_a_moment)
    state = loader.state_dict()
    first = iter(loader)
    take(first, 1)
    loader.load_state_dict(state | {"row": 4 * BATCH})
    assert keys(iter(loader)) == whole[4 * BATCH :]
    assert loader.state_dict()["epoch"] == 1
    del first


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_position_loaded_into_the_data_set_counts_for_its_loader(make: Any, num_workers: int) -> None:
    loader = make(num_workers=num_workers)
    batches = iter(loader)
    take(batches, 3)
    elsewhere = loader.state_dict() | {"epoch": 2, "row": 7 * BATCH}
    loader.dataset.load_state_dict(elsewhere)
    assert loader.state_dict() == elsewhere
    with pytest.raises(ConfigError, match="position was moved"):
        next(batches)
    assert loader.state_dict() == elsewhere


# Positions.


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_rollback_inside_one_process_repeats_what_followed(make: Any, options: dict[str, Any]) -> None:
    loader = make(**options)
    batches = iter(loader)
    take(batches, 3)
    state = loader.state_dict()
    expected = take(batches, 6)
    for _ in range(2):
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert take(iter(loader), 6) == expected
    loader.load_state_dict(state)
    rest = keys(loader)
    assert rest[: len(expected)] == expected
    loader.load_state_dict(state | {"epoch": 4})
    assert len(keys(loader)) == len(rest)
    assert loader.state_dict()["epoch"] == 5


@pytest.mark.parametrize("tail", ["drop", "pad", "keep"])
def test_saved_and_resumed_over_and_over_the_sequence_is_that_of_one_run(make: Any, tail: str) -> None:
    """Save, resume, save, resume, over the edge of an epoch, resume; each life with other workers."""
    dataset = {"tail": tail}
    options = {"dataset": dataset, "batch_size": 48}  # leaves a tail
    reference = make(**options)
    expected = [keys(reference), keys(reference)]
    steps = len(reference)
    state: dict[str, Any] | None = None
    got: list[list[str]] = [[], []]
    for num_workers, num_batches in [(0, 2), (2, 5), (1, steps - 8), (2, 1), (0, 3), (3, steps - 3)]:
        loader = make(num_workers=num_workers, **options)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        epoch = loader.epoch
        got[epoch] += take(iter(loader), num_batches)
        state = loader.state_dict()
    assert got == expected
    assert (state["epoch"], state["row"]) == (2, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_state_at_the_end_of_an_epoch_is_the_start_of_the_next(make: Any, num_workers: int) -> None:
    loader = make(num_workers=num_workers)
    states = [loader.state_dict() for _ in loader]
    assert (states[-1]["epoch"], states[-1]["row"], loader.epoch) == (1, 0, 1)
    assert loader.state_dict() == states[-1]
    assert [state["row"] for state in states[:-1]] == [BATCH * k for k in range(1, len(loader))]
    following = make(num_workers=1)
    following.load_state_dict(states[-1])
    assert keys(loader) == keys(following)


def test_a_rank_without_a_part_of_the_last_step_agrees_with_the_others(make: Any) -> None:
    """1024 samples in 16 lanes of 64 rows; steps of 28 rows leave a last one of 8, in which rank 1 of 32 has none."""
    positions = []
    for rank in (0, 1):
        loader = make(dataset={"tail": "keep", "rank": rank, "world_size": 32, "lanes": 16}, batch_size=14)
        seen = []
        for epoch in range(2):
            assert loader.epoch == epoch
            seen += [position(loader) for _ in loader]
            assert position(loader) == (epoch + 1, 0)
        positions.append(seen)
    assert positions[0] == [(0, 28), (0, 56), (1, 0), (1, 28), (1, 56), (2, 0)]
    assert positions[1] == [(0, 28), (0, 56), (1, 28), (1, 56)]


def position(loader: cl.DataLoader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["row"]


def test_an_epoch_without_a_single_batch_ends_too_and_says_why(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """All samples together fill no batch: the loop over epochs must not stand still."""
    loader = make(batch_size=2048)
    assert list(loader) == []
    assert "do not fill one global batch of 2048" in caplog.text
    assert loader.epoch == 1
    assert list(loader) == []
    assert loader.state_dict()["epoch"] == 2


def test_a_batch_size_set_between_two_batches_does_not_move_the_position(make: Any) -> None:
    loader = make()
    batches = iter(loader)
    take(batches, 3)
    loader.dataset.set_batch_size(64)
    state = loader.state_dict()
    assert state["row"] == 3 * BATCH
    loader.load_state_dict(state)
    whole = keys(make())
    assert take(iter(loader), 2) == whole[3 * BATCH : 3 * BATCH + 128]
    assert loader.state_dict()["row"] == 3 * BATCH + 128


# Torch's options.


def test_out_of_order_batches_have_no_position_between_them_and_one_at_the_end(make: Any) -> None:
    whole = keys(make())
    loader = make(num_workers=2, in_order=False)
    batches = iter(loader)
    taken = take(batches, 3)
    with pytest.raises(ConfigError, match="in_order=False"):
        loader.state_dict()
    taken += keys(batches)
    assert sorted(taken) == sorted(whole)
    assert (loader.state_dict()["epoch"], loader.state_dict()["row"]) == (1, 0)
    loader.load_state_dict(loader.state_dict() | {"epoch": 0, "row": BATCH})
    assert sorted(keys(loader)) == sorted(whole[BATCH:])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinned_memory_and_a_device_change_neither_batches_nor_position(make: Any, num_workers: int) -> None:
    options = {"num_workers": num_workers, "dataset": {"transform": number_of}, "collate_fn": None}
    expected = [batch.tolist() for batch in make(**options)]
    loader = make(**options, pin_memory=True, device="cpu")
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(3)] == expected[:3]
    assert loader.state_dict()["row"] == 3 * BATCH  # the one that was moved ahead is not counted
    assert [batch.tolist() for batch in batches] == expected[3:]


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["__key__"][len("sample") :])


def test_an_interrupted_next_is_not_papered_over(make: Any, tmp_path: Path) -> None:
    """A handler that raises inside ``next`` may lose the batch that was on its way; the position still tells."""
    whole = keys(make())
    may_read = tmp_path / "may read"
    loader = make(num_workers=2, dataset={"transform": Held(may_read)})
    batches = iter(loader)

    def interrupt(*_: Any) -> None:
        may_read.touch()
        raise TimeoutError("from a handler")

    with handled_in_next(signal.SIGUSR1, interrupt, is_due=True), pytest.raises(TimeoutError):
        next(batches)
    with pytest.raises(CacheloaderError):
        next(batches)
    loader.load_state_dict(loader.state_dict())
    assert keys(loader) == whole


@dataclass(frozen=True)
class Held:
    """A transform that waits for a file."""

    path: Path

    def __call__(self, sample: dict[str, Any]) -> tuple[str, str]:
        wait_until(self.path.exists, timeout_s=60)
        return key_and_digest(sample)
