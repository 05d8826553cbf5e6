"""``DataLoader``: torch's own, with an exact position and the waiting time of each batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch.utils.data

from cacheloader.dataset import RemoteDataset
from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cacheloader.state import Policy

T_co = TypeVar("T_co", covariant=True)


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """torch's DataLoader over a ``RemoteDataset``.

    Args:
        dataset: What to read.
        batch_size: Samples per batch and rank.
        **options: Everything else that torch's DataLoader takes, but ``shuffle``, ``sampler``, ``batch_sampler`` and
            ``drop_last``: the order belongs to the data set.

    Attributes:
        last_fetch_seconds: Time that the training thread spent inside ``next()`` for the latest batch, in seconds.

    Raises:
        ConfigError: An option that would change the order was passed.
    """

    last_fetch_seconds: float = 0.0

    def __init__(self, dataset: RemoteDataset, batch_size: int = 1, **options: Any) -> None:
        if not isinstance(dataset, RemoteDataset):
            raise ConfigError(
                f"cacheloader.DataLoader reads a RemoteDataset and got {type(dataset).__name__}; "
                "use torch.utils.data.DataLoader for other data sets"
            )
        for name, instead in (
            ("shuffle", "RemoteDataset(shuffle=…)"),
            ("sampler", "RemoteDataset(seed=…)"),
            ("batch_sampler", "batch_size"),
            ("drop_last", 'RemoteDataset(tail="drop"|"pad"|"keep")'),
        ):
            if options.pop(name, None):
                raise ConfigError(f"{name} would change an order that belongs to the data set; use {instead} instead")
        dataset.set_batch_size(batch_size)
        dataset.num_batches()  # a batch size that the lanes or the world cannot share fails here, not in a worker
        self._delivered = 0
        super().__init__(dataset, batch_size=batch_size, **options)

    @property
    def epoch(self) -> int:
        """The epoch under way, or the coming one if the last is complete."""
        return self._dataset.position_after(self._delivered).epoch

    def __len__(self) -> int:
        """Batches in a full epoch."""
        return self._dataset.num_batches()

    def __iter__(self) -> Any:
        self._dataset.restart_after(self._delivered)
        self._delivered = 0
        return _TimedIterator(self, super().__iter__())

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that this loader has handed out; plain types, equal on all ranks."""
        return self._dataset.state_dict(self._delivered)

    def load_state_dict(self, saved: Mapping[str, Any], *, on_mismatch: Mapping[str, Policy] | None = None) -> None:
        """Let the next iteration go on at a saved position; see ``RemoteDataset.load_state_dict``."""
        self._dataset.load_state_dict(saved, on_mismatch=on_mismatch)
        self._delivered = 0

    @property
    def _dataset(self) -> RemoteDataset:
        assert isinstance(self.dataset, RemoteDataset)
        return self.dataset

    def _took(self, fetch_seconds: float) -> None:
        self._delivered += 1
        self.last_fetch_seconds = fetch_seconds


class _TimedIterator:
    """Counts the batches that reach the training loop and times each ``next()``."""

    def __init__(self, loader: DataLoader[Any], batches: Iterator[Any]) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        batch = next(self._batches)
        self._loader._took(time.perf_counter() - start)
        return batch
