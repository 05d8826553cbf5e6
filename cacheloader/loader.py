"""``DataLoader``: torch's own, with an exact position and the waiting time of each batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, default_collate

from cacheloader.device import to_device
from cacheloader.errors import BadSample, ConfigError
from cacheloader.positioned import PositionedDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cacheloader.delivery import Delivered
    from cacheloader.state import Policy


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader over a ``RemoteDataset``.

    Each iteration is one epoch, complete or not. The position counts batches that the training loop has taken, never
    those that workers have read ahead.

    Args:
        dataset: What to read.
        batch_size: Samples per batch and rank.
        collate_fn: Makes a batch of a list of samples, in the worker; torch's default stacks tensors and groups fields.
        device: Move each batch there, on a stream of its own while the step before it computes.
        **options: Everything else that torch's DataLoader takes, but ``shuffle``, ``sampler``, ``batch_sampler`` and
            ``drop_last``: the order belongs to the data set.

    Attributes:
        last_fetch_seconds: Time that the training thread spent inside ``next()`` for the latest batch, in seconds.
        num_skipped: Samples that the transform left out so far, by returning ``SKIP``.
        num_bad_samples: Samples that were left out since the transform failed on them.

    Raises:
        ConfigError: An option that would change the order was passed.
    """

    last_fetch_seconds: float = 0.0
    num_skipped: int = 0
    num_bad_samples: int = 0

    def __init__(
        self,
        dataset: PositionedDataset,
        batch_size: int = 1,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: str | torch.device | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(dataset, PositionedDataset):
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
        self._positioned = dataset
        self._device = None if device is None else torch.device(device)
        self._delivered = 0
        # Whole batches come from the data set, so that one from which samples were left out is shorter and the next
        # still begins where it should; torch's own batching would fill it up.
        collate: Callable[[Any], Any] = _Collate(collate_fn)
        super().__init__(_WholeBatches(dataset), batch_size=None, collate_fn=collate, **options)

    @property
    def batch_size(self) -> int | None:
        """Samples per batch and rank."""
        return self._positioned.batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """Torch's constructor says ``None`` here, since it is not the one that batches."""

    @property
    def epoch(self) -> int:
        """The epoch under way, or the coming one if the last is complete."""
        return self._positioned.position_after(self._delivered).epoch

    def __len__(self) -> int:
        """Batches in a full epoch."""
        return self._positioned.num_batches()

    def __iter__(self) -> Any:
        self._positioned.restart_after(self._delivered)
        self._delivered = 0
        batches = super().__iter__()
        return _TimedIterator(self, to_device(batches, self._device) if self._device else batches)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that this loader has handed out; plain types, equal on all ranks."""
        return self._positioned.state_dict(self._delivered)

    def load_state_dict(self, saved: Mapping[str, Any], *, on_mismatch: Mapping[str, Policy] | None = None) -> None:
        """Let the next iteration go on at a saved position; see ``RemoteDataset.load_state_dict``."""
        self._positioned.load_state_dict(saved, on_mismatch=on_mismatch)
        self._delivered = 0

    def _took(self, fetch_seconds: float, num_skipped: int, num_bad: int) -> None:
        self._delivered += 1
        self.last_fetch_seconds = fetch_seconds
        self.num_skipped += num_skipped
        self.num_bad_samples += num_bad


class _WholeBatches(IterableDataset[Any]):
    """What torch's DataLoader iterates; in all else the data set itself."""

    def __init__(self, dataset: PositionedDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Delivered]:
        return self._dataset.batches()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _Collate:
    """Runs the user's collate function in the worker and passes on what was left out."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._collate_fn = collate_fn

    def __call__(self, batch: Delivered) -> tuple[Any, int, int]:
        if not batch.samples and self._collate_fn is None:
            raise BadSample(
                f"the transform left out all {batch.num_skipped + batch.num_bad} samples of a batch, and a rank "
                "without a batch would leave the others waiting; skip fewer, or pass a collate_fn that accepts []"
            )
        return (self._collate_fn or default_collate)(batch.samples), batch.num_skipped, batch.num_bad


class _TimedIterator:
    """Counts the batches that reach the training loop and times each ``next()``."""

    def __init__(self, loader: DataLoader, batches: Iterator[tuple[Any, int, int]]) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        data, num_skipped, num_bad = next(self._batches)
        self._loader._took(time.perf_counter() - start, num_skipped, num_bad)
        return data
