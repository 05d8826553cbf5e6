"""What a loader records of its batches, if it was told to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheloader import world
from cacheloader.dataset import RemoteDataset
from cacheloader.errors import ConfigError
from cacheloader.steps import StepLog

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cacheloader.cursor import Start
    from cacheloader.positioned import PositionedDataset


class Records:
    """The step log of one loader; opened at its first iteration, when the ranks know each other.

    Args:
        folder: Where to write.
        dataset: What the loader reads.

    Raises:
        ConfigError: The data set has no single order that an audit could compute again.
    """

    def __init__(self, folder: Path, dataset: PositionedDataset) -> None:
        if not isinstance(dataset, RemoteDataset):
            raise ConfigError(
                f"record_to reads the order of one RemoteDataset and got a {type(dataset).__name__}; leave it out here"
            )
        self._folder = folder
        self._dataset = dataset
        self._log: StepLog | None = None
        self._rows = self._global_batch = 0

    def begin(self, start: Start, *, num_workers: int) -> None:
        """An iteration starts."""
        dataset = self._dataset
        self._rows, self._global_batch = dataset.rows_per_step(), dataset.global_batch()
        if self._log is None:
            here = dataset.world
            self._log = StepLog(
                self._folder, attempt=world.attempt_name(here), rank=here.rank, world_size=here.world_size
            )
        place = dataset.loaded_at(start)
        self._log.begin(
            epoch=place.epoch,
            row=place.row,
            global_batch=self._global_batch,
            num_workers=num_workers,
            manifest=dataset.manifest,
            order=dataset.position_after(0).order,
        )

    def step(
        self,
        *,
        epoch: int,
        row: int,
        num_samples: int,
        num_skipped: int,
        num_bad: int,
        fetch_s: float,
        keys: Sequence[int] | None,
    ) -> None:
        """The training loop gets a batch."""
        assert self._log is not None, "step before begin"
        self._log.step(
            epoch=epoch,
            row=row,
            rows=self._rows,
            global_batch=self._global_batch,
            num_samples=num_samples,
            num_skipped=num_skipped,
            num_bad=num_bad,
            fetch_s=fetch_s,
            keys=keys,
        )
