"""One pass over a data set, sample by sample, that can say where it stands and be told where to go on.

A loader that keeps a state for each of its workers, such as torchdata's ``StatefulDataLoader``, asks the iterator that
a worker reads from. So the iterator's state counts what that worker's iterator handed out, whereas a data set's own
state counts what the training loop took from all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cacheloader import state
from cacheloader.cursor import Start
from cacheloader.errors import ConfigError, StateMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cacheloader.delivery import Delivered
    from cacheloader.positioned import PositionedDataset

FORMAT_VERSION = 1

_COUNTS = ("row", "worker", "num_workers", "global_batch")


class SampleIterator:
    """The iterator of a data set. Nothing begins before its first sample, or its first state, is asked for."""

    def __init__(self, dataset: PositionedDataset) -> None:
        self._dataset = dataset
        self._begun: state.Position | None = None  # where the iteration started, the same for all workers
        self._round_row = 0  # worker 0's row in the round of batches, one a worker, that is next
        self._batches: Iterator[Delivered] = iter(())
        self._samples: list[Any] = []
        self._taken = 0

    def __iter__(self) -> SampleIterator:
        return self

    def __next__(self) -> Any:
        self._begin()
        while self._taken == len(self._samples):
            batch = next(self._batches)
            if batch.num_skipped or batch.num_bad:
                raise ConfigError(
                    "the transform skipped a sample, and a loader that takes samples one by one would fill the batch "
                    "from a later one and lose the position; use cacheloader.DataLoader, which delivers it shorter"
                )
            worker, num_workers = self._dataset.worker()
            self._samples, self._taken = batch.samples, 0
            self._round_row = batch.row + (num_workers - worker) * self._dataset.rows_per_step()
        self._taken += 1
        return self._samples[self._taken - 1]

    def state_dict(self) -> dict[str, Any]:
        """How far this iterator is: plain types, fresh, always the same few.

        Raises:
            ConfigError: It is in the middle of a batch: the loader's batches are not those of the data set.
        """
        begun = self._begin()
        if self._taken < len(self._samples):
            raise ConfigError(
                f"the loader asks for a position after {self._taken} of {len(self._samples)} samples of a batch; pass "
                "the loader's batch size to the data set as batch_size="
            )
        worker, num_workers = self._dataset.worker()
        return {
            "version": FORMAT_VERSION,
            "begun": begun.to_dict(),
            "row": self._round_row,
            "worker": worker,
            "num_workers": num_workers,
            "global_batch": self._dataset.global_batch(num_workers=num_workers),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where another iterator stood.

        Args:
            saved: What its ``state_dict`` returned, in the worker of the same number.

        Raises:
            StateMismatch: It belongs to another data set, order, worker or number of workers, or to another global
                batch where workers take turns.
        """
        position, counts = _parsed(saved)
        worker, num_workers = self._dataset.worker()
        here = {
            "worker": worker,
            "num_workers": num_workers,
            "global_batch": self._dataset.global_batch(num_workers=num_workers),
        }
        for name, value in here.items():
            # A process that reads alone is at a plain row, from which batches of any size can go on.
            if counts[name] != value and not (name == "global_batch" and num_workers == 1):
                raise StateMismatch(
                    f"the saved state is that of one worker of a loader and has {name}={counts[name]}, here it is "
                    f"{value}; keep it, or save and load dataset.state_dict(batches=…) or the state of "
                    "cacheloader.DataLoader, which fit any number of ranks and workers and any batch size"
                )
        self._begun = self._dataset.rejoin(position, row=counts["row"])
        self._open(counts["row"])

    def _begin(self) -> state.Position:
        if self._begun is None:
            self._begun = self._dataset.join()
            self._open(self._begun.row)
        return self._begun

    def _open(self, round_row: int) -> None:
        assert self._begun is not None
        self._batches = self._dataset.batches(Start(epoch=self._begun.epoch, row=round_row))
        self._round_row = round_row
        self._samples, self._taken = [], 0


def _parsed(saved: Mapping[str, Any]) -> tuple[state.Position, dict[str, int]]:
    if saved.get("version") != FORMAT_VERSION or set(saved) != {"version", "begun", *_COUNTS}:
        raise StateMismatch(
            f"the saved state of an iterator has the fields {sorted(saved)} in version {saved.get('version')!r}, and "
            f"this cacheloader reads {sorted(('begun', *_COUNTS))} in version {FORMAT_VERSION}; pass what state_dict() "
            "returned, unchanged"
        )
    return state.parse(saved["begun"]), {name: int(saved[name]) for name in _COUNTS}
