"""What all data sets here have in common: one epoch a pass, a position, batches shared by ranks and workers."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from cacheloader import state, world
from cacheloader.cursor import SharedCursor, Start
from cacheloader.delivery import Delivered, Delivery, OnBadSample
from cacheloader.errors import ConfigError
from cacheloader.order.draws import place_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from cacheloader.formats.base import Sample


class Steps(Protocol):
    """The steps of an order, counted in rows; ``order.SampleOrder`` tells the rules."""

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


class Reading(Protocol):
    """One process's pass over one epoch."""

    def read(self, row: int) -> Batch:
        """This rank's samples of the step that starts at ``row``."""
        ...

    def advance(self, row: int) -> None:
        """Every row before ``row`` is done."""
        ...

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
        self._num_iterations = 0

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
        """Let the next iteration be the start of ``epoch``."""
        self._cursor.move_to(Start(epoch=epoch, row=0))

    def restart_after(self, batches: int) -> None:
        """Let the next iteration be a new epoch if the one under way has delivered any batch, else the same again.

        Args:
            batches: Batches of the iteration under way that the training loop has taken.
        """
        start = self._cursor.current
        if start is not None:
            self._cursor.move_to(Start(epoch=start.epoch + 1, row=0) if batches else start)

    def position_after(self, batches: int) -> state.Position:
        """The position when the training loop has taken ``batches`` batches of the iteration under way."""
        steps, global_batch = self._steps(), self.global_batch()
        start = self._cursor.current or self._cursor.next
        epoch, row = start.epoch, start.row + batches * steps.rows_per_step(global_batch)
        if batches and steps.steps_remaining(row=row, global_batch=global_batch) == 0:
            epoch, row = epoch + 1, 0
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
        position = state.parse(saved)
        here = state.reconcile(position, self._identity(position), on_mismatch=on_mismatch)
        self._adopt(here)
        start = Start(epoch=here.epoch, row=here.row)
        if (
            self._batch_size is not None
            and start.row
            and not self._steps().steps_remaining(row=start.row, global_batch=self.global_batch())
        ):
            start = Start(epoch=start.epoch + 1, row=0)  # what is left fills no batch of this size
        self._cursor.move_to(start)

    # Reading.

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches():
            if batch.num_skipped or batch.num_bad:
                raise ConfigError(
                    "the transform skipped a sample, and a loader that takes samples one by one would fill the batch "
                    "from a later one and lose the position; use cacheloader.DataLoader, which delivers it shorter"
                )
            yield from batch.samples

    def batches(self) -> Iterator[Delivered]:
        """One pass, by whole batches; in a worker process, that worker's share."""
        worker = get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self._num_iterations += 1
        start = self._cursor.begin(
            worker=number,
            seed=0 if worker is None else worker.seed - worker.id,
            iteration=-self._num_iterations if worker is None else self._num_iterations,
        )
        return self._read(start, worker=number, num_workers=num_workers)

    def _read(self, start: Start, *, worker: int, num_workers: int) -> Iterator[Delivered]:
        global_batch = self.global_batch(num_workers=num_workers)
        rows = self._steps().worker_rows(
            row=start.row, global_batch=global_batch, worker=worker, num_workers=num_workers
        )
        reading = self._begin(start, global_batch)
        try:
            for row in rows:
                batch = reading.read(row)
                reading.advance(row + rows.step)
                if not batch.samples:
                    continue  # tail="keep": this rank has no part in the last step
                words = place_words(seed=self._seed, epoch=start.epoch, lane=batch.lane, row=batch.row)
                yield self._delivery.deliver(batch.samples, words)
        finally:
            reading.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_num_iterations": 0}
