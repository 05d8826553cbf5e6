"""What the workers of a ``DataLoader`` run: whole batches, each with a note of what it is."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from cacheloader.errors import BadSample
from cacheloader.heap import keep_freed_memory
from cacheloader.parcel import Parcel, Pile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cacheloader.ahead import ReadAhead
    from cacheloader.blocks import Blocks
    from cacheloader.cursor import Start
    from cacheloader.delivery import Delivered
    from cacheloader.positioned import PositionedDataset

_LEAVES = frozenset((torch.Tensor, np.ndarray, int, float, bool, str, bytes))


class WholeBatches(IterableDataset[Any]):
    """What torch's DataLoader iterates; in all else the data set itself."""

    def __init__(self, dataset: PositionedDataset) -> None:
        self._dataset = dataset
        self.start: Start | None = None
        self.read_ahead: ReadAhead | None = None

    def made(self, collate: Collate) -> Iterator[tuple[Any, Note]]:
        """What ``collate`` makes of each batch: the threads that read ahead, unless it runs a function of the user."""
        return map(collate, self._batches()) if collate.is_users else self._batches(make=collate)

    def __iter__(self) -> Iterator[Delivered]:
        return self._batches()

    def _batches(self, **options: Any) -> Iterator[Any]:
        # A new worker brings its start along. One that persists finds the next on the cursor's page; the owner waits
        # for all of them before it could open another.
        start, self.start = self.start, None
        return self._dataset.batches(start or self._dataset.iteration_start(), read_ahead=self.read_ahead, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


class Note(NamedTuple):
    """What comes along with a batch."""

    epoch: int
    row: int
    num_samples: int
    num_skipped: int
    num_bad: int
    keys: list[int] | None


class Collate:
    """Runs the user's collate function in the worker and notes what the batch is."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None, *, with_keys: bool) -> None:
        self._collate_fn = collate_fn
        self._with_keys = with_keys
        self.blocks: Blocks | None = None

    @property
    def is_users(self) -> bool:
        """Whether it runs a function of the user."""
        return self._collate_fn is not None

    def __call__(self, batch: Delivered) -> tuple[Any, Note]:
        """The user's batch and its note."""
        if not batch.samples and self._collate_fn is None:
            raise BadSample(
                f"the transform left out all {batch.num_skipped + batch.num_bad} samples of a batch, and a rank "
                "without a batch would leave the others waiting; skip fewer, or pass a collate_fn that accepts []"
            )
        note = Note(
            epoch=batch.epoch,
            row=batch.row,
            num_samples=len(batch.samples),
            num_skipped=batch.num_skipped,
            num_bad=batch.num_bad,
            keys=batch.number.tolist() if self._with_keys and batch.number is not None else None,
        )
        worker = get_worker_info()
        if worker is None or self.blocks is None:
            return (self._collate_fn or default_collate)(batch.samples), note
        keep_freed_memory()
        if self._collate_fn is not None:
            return Parcel.packed(self._collate_fn(batch.samples), self.blocks, worker=worker.id), note
        piles: list[Pile] = []
        stack = partial(_piled, piles) if _is_torchs_alone(batch.samples[0]) else _stacked
        collated = _collate(batch.samples, stack)
        data = Parcel.packed(collated, self.blocks, worker=worker.id)
        if piles and data is collated:  # no block was free: it travels as torch sends it, who knows no piles
            data = Parcel.packed(_collate(batch.samples, _stacked), self.blocks, worker=worker.id)
        if isinstance(data, Parcel):
            batch.samples.clear()  # or they would be kept for as long as the next batch is made
        return data, note


def _is_torchs_alone(sample: Any) -> bool:
    """Whether nobody but torch's own default collation and a parcel gets to see the stacks made of such samples."""
    kind = type(sample)
    if kind is dict or kind is OrderedDict:
        return all(map(_is_torchs_alone, sample.values()))
    if kind is list or kind is tuple or (isinstance(sample, tuple) and hasattr(sample, "_make")):
        return all(map(_is_torchs_alone, sample))
    return kind in _LEAVES or isinstance(sample, np.generic)


def _collate(samples: list[Any], stack: Callable[..., Any]) -> Any:
    """The default of torch, but for how tensors are stacked."""
    return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: stack})


def _piled(piles: list[Pile], tensors: list[torch.Tensor], **options: Any) -> Any:
    """What will be stacked in the block itself, which ``piles`` is told of."""
    pile = Pile.of(tensors)
    if pile is None:
        return _stacked(tensors, **options)
    piles.append(pile)
    return pile


def _stacked(tensors: list[torch.Tensor], **options: Any) -> Any:
    """Stacked in memory of this process, and not in memory of its own to share: it is the block that will be shared."""
    first = tensors[0]
    is_plain = type(first) is torch.Tensor and first.device.type == "cpu" and first.layout == torch.strided
    if not is_plain or first.is_nested or any(tensor.requires_grad for tensor in tensors):
        return default_collate_fn_map[torch.Tensor](tensors, **options)
    return torch.stack(tensors, 0)


def unpacked(batch: tuple[Any, Note]) -> tuple[Any, Note]:
    """What ``Collate`` returned in a worker, as it arrives in the training process."""
    data, note = batch
    return (data.unpacked() if isinstance(data, Parcel) else data), note
