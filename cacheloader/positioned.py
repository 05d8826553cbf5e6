"""What all data sets here have in common: one epoch a pass, a position, batches shared by ranks and workers."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from cacheloader import foreign, state, world
from cacheloader.ahead import Ahead, Planner, ReadAhead, in_turn
from cacheloader.cursor import SharedCursor, Start
from cacheloader.delivery import Delivered, Delivery, OnBadSample
from cacheloader.errors import ConfigError, StateMismatch
from cacheloader.order.draws import place_words
from cacheloader.samples import SampleIterator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from cacheloader.formats.base import Sample
    from cacheloader.transport.reporting import FetchReporter

_logger = logging.getLogger(__name__)


class Steps(Protocol):
    """The steps of an order, counted in rows; ``order.SampleOrder`` tells the rules."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        ...

    @property
    def rows_per_epoch(self) -> int:
        """Rows of an epoch."""
        ...

    def rows_per_step(self, global_batch: int) -> int:
        """Rows that one step takes; a ConfigError if the lanes cannot share it."""
        ...

    def steps_remaining(self, *, row: int, global_batch: int) -> int:
        """Steps in the rest of an epoch."""
        ...

    def next_epoch(self, *, epoch: int, row: int, global_batch: int) -> tuple[int, int]:
        """Epoch and row at which to go on behind the last step of an epoch."""
        ...

    def worker_rows(self, *, row: int, global_batch: int, worker: int, num_workers: int) -> range:
        """First rows of one worker's batches."""
        ...

    def rank_samples_remaining(self, *, row: int, global_batch: int, rank: int, world_size: int) -> int:
        """Samples that one rank still gets."""
        ...


class Batch(Protocol):
    """The raw samples of one rank's part of a step."""

    @property
    def samples(self) -> list[Sample]:
        """In place order."""
        ...

    @property
    def lane(self) -> NDArray[np.int64]:
        """int64 [n]; with ``row`` it names the place of each sample."""
        ...

    @property
    def row(self) -> NDArray[np.int64]:
        """int64 [n]."""
        ...

    @property
    def number(self) -> NDArray[np.int64]:
        """int64 [n]; which sample of the data set each one is, counted through the manifest."""
        ...


class Reading(Planner, Protocol):
    """One process's pass over one epoch; what it plans reads a ``Batch``."""

    def close(self) -> None:
        """Give back what is held; calling it again does nothing."""
        ...


class PositionedDataset(IterableDataset[Any]):
    """Base of ``RemoteDataset`` and ``Mixture``.

    Args:
        transform: See ``delivery.Delivery``.
        batch_size: Samples per batch and rank, ``None`` while unknown.
        rank: Rank of this process, ``None`` to detect it.
        world_size: Number of ranks, ``None`` to detect it.
        on_bad_sample: See ``delivery.Delivery``.
        max_bad_samples: See ``delivery.Delivery``.
    """

    def __init__(
        self,
        *,
        transform: Callable[..., Any] | None,
        batch_size: int | None,
        rank: int | None,
        world_size: int | None,
        on_bad_sample: OnBadSample,
        max_bad_samples: int,
    ) -> None:
        super().__init__()
        self._delivery = Delivery(transform, on_bad_sample=on_bad_sample, max_bad_samples=max_bad_samples)
        self._world = world.detect(rank=rank, world_size=world_size)
        self._batch_size: int | None = None
        if batch_size is not None:
            self.set_batch_size(batch_size)
        self._cursor = SharedCursor()
        self._home_pid = os.getpid()
        self._num_iterations = 0
        self._open_global_batch: int | None = None  # what the batches of the iteration under way have, if we opened it
        self._loaded: tuple[Start, Start] | None = None

    # What a kind of data set adds to this.

    @abstractmethod
    def _steps(self) -> Steps:
        """The order's steps."""

    @abstractmethod
    def _begin(self, start: Start, global_batch: int) -> Reading:
        """Open a pass over the rest of an epoch."""

    @abstractmethod
    def _identity(self, saved: state.Position | None) -> state.Position:
        """Manifest and order of this data set, as far as it has a choice those of ``saved``."""

    @abstractmethod
    def _adopt(self, position: state.Position) -> None:
        """Use the order of a position that ``_identity`` has given."""

    @abstractmethod
    def fetch_reporter(self) -> FetchReporter:
        """A way to tell the node's daemon how long the training loop waits."""

    @property
    @abstractmethod
    def is_raw(self) -> bool:
        """Whether samples are delivered as they lie in the shards, without any computing."""

    @property
    @abstractmethod
    def _seed(self) -> int:
        """What the randomness of transforms starts from."""

    @property
    @abstractmethod
    def _is_one_sequence(self) -> bool:
        """Whether the order is the same for every batch size, read by one process."""

    # What it is.

    @property
    def batch_size(self) -> int | None:
        """Samples per batch and rank, ``None`` while unknown."""
        return self._batch_size

    def set_batch_size(self, batch_size: int) -> None:
        """Use another batch size from the next iteration on."""
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} is below 1")
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Samples that this rank delivers in a full epoch, if the transform skips none."""
        return self._steps().rank_samples_remaining(
            row=0, global_batch=self.global_batch(), rank=self._world.rank, world_size=self._world.world_size
        )

    def num_batches(self) -> int:
        """Batches that every rank delivers in a full epoch."""
        return self._steps().steps_remaining(row=0, global_batch=self.global_batch())

    def rows_per_step(self) -> int:
        """Rows of the order that one step over all ranks takes."""
        return self._steps().rows_per_step(self.global_batch())

    def shards_at(self, *, epoch: int, row: int) -> list[str]:
        """URIs of the shards that this rank reads in the step that starts at ``row``; empty where nobody can say."""
        del epoch, row
        return []

    @property
    def world(self) -> world.World:
        """The ranks that share the data set."""
        return self._world

    def global_batch(self, *, num_workers: int = 1) -> int:
        """Samples of one step over all ranks.

        Raises:
            ConfigError: The batch size is unknown and the order depends on it.
        """
        if self._batch_size is not None:
            return self._batch_size * self._world.world_size
        if self._world.world_size == 1 and self._is_one_sequence and num_workers == 1:
            return 1
        raise ConfigError(
            f"batch_size is unknown to the data set, and its order over world_size={self._world.world_size} and "
            f"{num_workers} workers depends on it; pass batch_size= to the data set with the loader's batch size, "
            "or use cacheloader.DataLoader"
        )

    # Where it stands.

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, else of the coming one."""
        return (self._cursor.current or self._cursor.next).epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be one of ``epoch``: from its start, or from a position in it that was just loaded.

        Raises:
            ConfigError: A position in another epoch was just loaded.
        """
        foreign.refuse_second_deal(self, self._world)
        if self._is_copy():
            self._leave_parent()
        if not self._cursor.is_pinned:
            self._cursor.move_to(Start(epoch=epoch, row=0))
        elif self._cursor.next.epoch != epoch:
            raise ConfigError(
                f"set_epoch({epoch}) would leave the position that was just loaded, in epoch "
                f"{self._cursor.next.epoch}; start the loop over epochs at the data set's epoch"
            )

    def restart_after(self, batches: int) -> None:
        """Let the next iteration be a new epoch if the one under way has delivered any batch, else the same again.

        Args:
            batches: Batches of the iteration under way that the training loop has taken.
        """
        if self._is_copy():
            self._leave_parent()
            return
        start = self._cursor.current
        if start is not None:
            self._cursor.move_to(self._cursor.next if batches else start)

    def open_iteration(self) -> tuple[int, Start]:
        """Begin the next iteration; its number and where it starts, for ``batches`` in the workers."""
        self._open_global_batch = self.global_batch()
        opened = self._cursor.open(self._behind), self.iteration_start()
        if not len(self):
            _logger.warning(
                "no epoch has a batch: %d samples do not fill one global batch of %d, and tail='drop' leaves out what "
                "fills none; lower batch_size, or pass tail='pad' or 'keep'",
                self._steps().num_samples,
                self._open_global_batch,
            )
        return opened

    def iteration_start(self) -> Start:
        """Where the iteration under way started."""
        start = self._cursor.current
        assert start is not None, "no iteration is under way"
        return start

    def loaded_at(self, start: Start) -> Start:
        """The position that was loaded for the iteration that starts at ``start``; the same if nothing was.

        They differ where what was left of the epoch filled no batch and was passed over.
        """
        came_to, loaded = self._loaded or (start, start)
        self._loaded = None
        return loaded if came_to == start else start

    def is_under_way(self, number: int) -> bool:
        """Whether ``number`` is the iteration under way: no later one was opened and the position was not moved."""
        return self._cursor.is_under_way(number)

    def end_iteration(self) -> None:
        """Every batch of the iteration under way was taken, maybe none: the position is the next epoch's start."""
        self._cursor.move_to(self._cursor.next)

    def position_after(self, batches: int) -> state.Position:
        """The position when the training loop has taken ``batches`` batches of the iteration under way.

        If there is none, since the position was moved, then there are no batches to count.
        """
        start = self._cursor.current
        if start is None:
            start, batches, self._open_global_batch = self._cursor.next, 0, None
        steps, global_batch = self._steps(), self._open_global_batch or self.global_batch()
        epoch, row = start.epoch, start.row + batches * steps.rows_per_step(global_batch)
        if batches and steps.steps_remaining(row=row, global_batch=global_batch) == 0:
            epoch, row = steps.next_epoch(epoch=epoch, row=row, global_batch=global_batch)
        here = self._identity(None)
        return state.Position(manifest=here.manifest, order=here.order, epoch=epoch, row=row)

    def state_dict(self, batches: int = 0) -> dict[str, Any]:
        """The position as plain types, equal on all ranks.

        Args:
            batches: Batches of the iteration under way that the training loop has taken. ``cacheloader.DataLoader``
                counts them itself: ask its ``state_dict``.
        """
        return self.position_after(batches).to_dict()

    def load_state_dict(
        self, saved: Mapping[str, Any], *, on_mismatch: Mapping[str, state.Policy] | None = None
    ) -> None:
        """Let the next iteration go on at a saved position.

        Args:
            saved: What ``state_dict`` returned.
            on_mismatch: Per field that may differ, ``"accept"`` or ``"restart_epoch"``; see ``state.reconcile``.

        Raises:
            StateMismatch: The position belongs to another data set or order; nothing has changed then.
        """
        if self._is_copy():
            self._leave_parent()
        position = state.parse(saved)
        here = self._reconciled(position, on_mismatch)
        start = Start(epoch=here.epoch, row=here.row)
        if (
            self._batch_size is not None
            and start.row
            and not self._steps().steps_remaining(row=start.row, global_batch=self.global_batch())
        ):
            start = self._behind(start)  # what is left fills no batch of this size
        self._loaded = (start, Start(epoch=here.epoch, row=here.row))
        self._cursor.move_to(start, pin=True)

    def _reconciled(
        self, position: state.Position, on_mismatch: Mapping[str, state.Policy] | None = None
    ) -> state.Position:
        here = state.reconcile(position, self._identity(position), on_mismatch=on_mismatch)
        before = self._identity(None).order
        if get_worker_info() is not None and here.order != before:
            different = next(name for name in here.order if here.order[name] != before.get(name))
            raise StateMismatch(
                f"the saved position has {different}={here.order[different]!r}, which a worker process could take on "
                f"for this epoch only: the next one would begin with {before.get(different)!r}; pass "
                f"{different}={here.order[different]!r} to the data set"
            )
        self._adopt(here)
        return here

    # Reading.

    def __iter__(self) -> SampleIterator:
        return SampleIterator(self)

    def batches(
        self,
        start: Start | None = None,
        *,
        read_ahead: ReadAhead | None = None,
        make: Callable[[Delivered], Any] | None = None,
    ) -> Iterator[Any]:
        """One pass, by whole batches; in a worker process, that worker's share.

        Args:
            start: Where the pass starts, if the owner has opened the iteration; else the workers find out together.
            read_ahead: Read in threads; ``None`` to read each batch when it is asked for.
            make: What is handed out in place of a batch; with ``read_ahead`` any thread may call it.
        """
        self._leave_if_orphaned()
        return self._read(self._join() if start is None else start, read_ahead, make or (lambda batch: batch))

    def _is_copy(self) -> bool:
        """Whether this is the copy of a process that the user's program has started, not that of a worker."""
        return os.getpid() != self._home_pid and get_worker_info() is None

    def _leave_parent(self) -> None:
        self._home_pid = os.getpid()
        self._cursor = self._cursor.after_fork()
        self._open_global_batch = None

    def _leave_if_orphaned(self) -> None:
        # torch's worker remembers its parent when it has started. If the parent was killed before that, the worker
        # remembers init instead, waits for work for ever and keeps its leases.
        if get_worker_info() is not None and os.getppid() == 1 != self._home_pid:
            os._exit(1)

    def worker(self) -> tuple[int, int]:
        """Number of this worker process and how many there are; 0 of 1 in the main process."""
        worker = get_worker_info()
        return (0, 1) if worker is None else (worker.id, worker.num_workers)

    def join(self) -> state.Position:
        """Join the iteration that a loader has just begun, or begin it; where it starts."""
        start = self._join()
        here = self._identity(None)
        return state.Position(manifest=here.manifest, order=here.order, epoch=start.epoch, row=start.row)

    def rejoin(self, position: state.Position, *, row: int) -> state.Position:
        """``join`` the iteration that began at ``position``, in another life of this job.

        Args:
            position: Where it began.
            row: Where worker 0 goes on.

        Raises:
            StateMismatch: The position belongs to another data set or order.
        """
        here = self._reconciled(position)
        start = Start(epoch=here.epoch, row=here.row)
        self._cursor.move_to(start)
        # Who reads alone may go on with another batch size, and then the steps to come decide where they end. Several
        # workers keep it, and the last round of batches need not have one for each.
        self._join(Start(epoch=here.epoch, row=row) if self.worker()[1] == 1 else start)
        return here

    def _join(self, here: Start | None = None) -> Start:
        worker = get_worker_info()
        self._num_iterations += 1
        return self._cursor.begin(
            worker=0 if worker is None else worker.id,
            seed=0 if worker is None else worker.seed - worker.id,
            iteration=-self._num_iterations if worker is None else self._num_iterations,
            behind=lambda start: self._behind(here or start),
        )

    def _behind(self, start: Start) -> Start:
        """Where to go on when an iteration from ``start`` is over."""
        global_batch = self.global_batch(num_workers=self.worker()[1])
        epoch, row = self._steps().next_epoch(epoch=start.epoch, row=start.row, global_batch=global_batch)
        return Start(epoch=epoch, row=row)

    def _read(self, start: Start, read_ahead: ReadAhead | None, make: Callable[[Delivered], Any]) -> Iterator[Any]:
        worker, num_workers = self.worker()
        global_batch = self.global_batch(num_workers=num_workers)
        rows = self._steps().worker_rows(
            row=start.row, global_batch=global_batch, worker=worker, num_workers=num_workers
        )
        reading = self._begin(start, global_batch)

        def made(row: int, batch: Batch) -> Any:
            if not batch.samples:
                return None  # tail="keep": this rank has no part in the last step
            delivered = self._deliver(batch, epoch=start.epoch)
            return make(replace(delivered, epoch=start.epoch, row=row, number=batch.number))

        ahead = None if read_ahead is None else Ahead(reading, rows, read_ahead, made)
        try:
            for batch in in_turn(reading, rows, made) if ahead is None else ahead:
                if batch is not None:
                    yield batch
                batch = None  # noqa: PLW2901  (it is the loop's alone, and may be freed while the next is made)
        finally:
            if ahead is not None:
                ahead.close()
            reading.close()

    def _deliver(self, batch: Batch, *, epoch: int) -> Delivered:
        if not self._delivery.has_transform:
            return Delivered(samples=batch.samples)
        words = place_words(seed=self._seed, epoch=epoch, lane=batch.lane, row=batch.row)
        return self._delivery.deliver(batch.samples, words)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_num_iterations": 0}
