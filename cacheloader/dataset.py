"""``RemoteDataset``: samples of remote shards, in an order that needs only a position to go on from."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheloader import state
from cacheloader.ahead import Planned
from cacheloader.config import TransportOptions
from cacheloader.errors import ConfigError, EmptyDataset
from cacheloader.order.distinct import distinct
from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder
from cacheloader.positioned import PositionedDataset
from cacheloader.protocol.messages import DatasetSpec
from cacheloader.source import Source
from cacheloader.transport.base import AccessPlan
from cacheloader.transport.opening import absolute_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from cacheloader.cursor import Start
    from cacheloader.delivery import Delivery, OnBadSample
    from cacheloader.formats.base import Sample
    from cacheloader.manifest.record import Manifest
    from cacheloader.shelf import Shelf
    from cacheloader.transport.reporting import FetchReporter


class RemoteDataset(PositionedDataset):
    """Samples of shards that lie in an object store, on a web server or on a mounted volume.

    Works under ``cacheloader.DataLoader`` and under torch's own. Each pass over it is one epoch; ranks and workers
    share the epoch between them without talking to each other.

    Args:
        urls: A URL or path, a brace pattern (``"s3://bucket/train-{000000..001023}.tar"``), a glob, a directory, or a
            list of those.
        shuffle: Whether to visit samples in a new order each epoch; ``False`` keeps the data set's order.
        seed: Decides the order together with the epoch.
        transform: Called with each sample, a dict of fields, in the process that reads it; its result is delivered,
            unless it is ``cacheloader.SKIP``. Python's, numpy's and torch's generators are seeded for each sample by
            its place in the order; a second argument, or one named ``rng``, gets a ``numpy.random.Generator``.
        storage_options: Options of the store, named as fsspec names them, such as ``{"endpoint_url": …, "key": …}``.
        batch_size: Samples per batch and rank. ``cacheloader.DataLoader`` sets it; under another loader pass the same
            number here as there.
        lanes: Number of parallel sequences that the data set is cut into, fixed for the life of a run. By default the
            world size at the start. The batch size times the world size must be a multiple of it.
        shuffle_window: Samples are mixed within this many consecutive shards of a lane.
        tail: What happens to samples that do not fill the last batch of all ranks: ``"drop"`` them, ``"pad"`` with
            samples from the start of the epoch (marked by the field ``__pad__``), or ``"keep"`` a smaller last batch.
        redeal: Fraction of the shards that change lanes from one epoch to the next; above 0 a node's cache misses them.
        format: Name of the shard format, where the file name does not tell.
        columns: Fields to read; all by default. ``__key__`` is always there.
        on_bad_sample: When the transform raises, ``"raise"`` or ``"skip"`` the sample and count it.
        max_bad_samples: How many may be skipped in one process before it is an error after all.
        rank: Rank of this process; by default from torch.distributed, else from RANK, else 0.
        world_size: Number of ranks; by default from torch.distributed, else from WORLD_SIZE, else 1.
        cache_dir: Where the node's cache lies, if no shared daemon runs.
        cache_size: What it may hold, in bytes or as text such as ``"200GiB"``.
        daemon: ``"unix:///run/…"`` for a shared daemon, ``"none"`` to read without a cache.
        timeout_s: Longest wait for one shard, in seconds.
        progress: Called with (stage, done, total) while the data set is resolved.

    Raises:
        ConfigError: An option cannot work.
        OriginError, DatasetError, DaemonError: The data set cannot be resolved; raised here, not in a worker.
    """

    def __init__(
        self,
        urls: str | Path | Sequence[str | Path],
        *,
        shuffle: bool = True,
        seed: int = 0,
        transform: Callable[..., Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        lanes: int | None = None,
        shuffle_window: int = 8,
        tail: str = "drop",
        redeal: float = 0.0,
        format: str | None = None,  # noqa: A002  (the name is part of the public surface)
        columns: Sequence[str] | None = None,
        on_bad_sample: OnBadSample = "raise",
        max_bad_samples: int = 100,
        rank: int | None = None,
        world_size: int | None = None,
        cache_dir: str | Path | None = None,
        cache_size: int | str | None = None,
        daemon: str | None = None,
        timeout_s: float = 300.0,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        super().__init__(
            transform=transform,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            on_bad_sample=on_bad_sample,
            max_bad_samples=max_bad_samples,
        )
        if urls is None:
            raise ConfigError("urls is None; name a URL, path, pattern or directory, or a list of them")
        self._lanes_are_given = lanes is not None or not shuffle
        self._options = OrderOptions(
            seed=seed,
            lanes=lanes if lanes is not None else (self._world.world_size if shuffle else 1),
            shuffle=shuffle,
            shuffle_window=shuffle_window,
            tail=tail,
            redeal=redeal,
        )
        self._source = Source(
            DatasetSpec(
                # Absolute from here on: a worker may run in another directory.
                urls=[
                    absolute_url(os.fspath(url)) for url in ([urls] if isinstance(urls, str | os.PathLike) else urls)
                ],
                format=format or "",
                storage_options=dict(storage_options or {}),
            ),
            transport_options=TransportOptions(
                daemon=daemon, cache_dir=cache_dir, cache_size=cache_size, timeout_s=timeout_s
            ),
            columns=columns,
            progress=progress,
        )
        self._order: SampleOrder | None = None
        self._layout = ""
        if not self.num_samples:
            raise EmptyDataset(f"{self.manifest.uri(0)} and the shards beside it hold no sample")

    @property
    def manifest(self) -> Manifest:
        """The shards, with sizes, versions and sample counts."""
        return self._source.manifest

    def fetch_reporter(self) -> FetchReporter:
        """A way to tell the node's daemon how long the training loop waits."""
        return self._source.fetch_reporter()

    @property
    def num_samples(self) -> int:
        """Samples in the data set, over all ranks."""
        return self._steps().num_samples

    def shards_at(self, *, epoch: int, row: int) -> list[str]:
        """URIs of the shards that this rank reads in the step that starts at ``row``."""
        share = {"global_batch": self.global_batch(), "rank": self._world.rank, "world_size": self._world.world_size}
        places = self._steps().batch(epoch=epoch, row=row, **share)
        return [self.manifest.uri(int(shard)) for shard in distinct(places.shard)]

    def parts(self) -> Parts:
        """What a mixture needs to read the data set in an order of its own."""
        return Parts(
            source=self._source,
            options=self._options,
            delivery=self._delivery,
            lanes=self._options.lanes if self._lanes_are_given else None,
        )

    @property
    def is_raw(self) -> bool:
        """Whether samples are delivered as they lie in the shards, without any computing."""
        return self._source.is_ranges and not self._delivery.has_transform

    @property
    def _seed(self) -> int:
        return self._options.seed

    @property
    def _is_one_sequence(self) -> bool:
        return self._options.lanes == 1

    def _steps(self) -> SampleOrder:
        if self._order is None:
            self._order = SampleOrder(self.manifest.num_samples, self._options)
        return self._order

    def _identity(self, saved: state.Position | None) -> state.Position:
        options = self._options
        if saved is not None and not self._lanes_are_given:
            lanes = saved.order.get("lanes")
            options = replace(options, lanes=lanes if isinstance(lanes, int) and lanes > 0 else options.lanes)
        if not self._layout:
            self._layout = state.layout(self.manifest.num_samples)
        return state.Position(
            manifest=self._source.digest, order={**state.order_fields(options), "layout": self._layout}
        )

    def _adopt(self, position: state.Position) -> None:
        lanes = int(position.order["lanes"])
        if lanes != self._options.lanes:
            self._options = replace(self._options, lanes=lanes)
            self._order = None

    def _begin(self, start: Start, global_batch: int) -> _Reading:
        order = self._steps()
        share = {"global_batch": global_batch, "rank": self._world.rank, "world_size": self._world.world_size}
        parts, clocks = [], []
        for epoch, row in ((start.epoch, start.row), (start.epoch + 1, 0)):
            parts.append(order.accesses(epoch=epoch, from_row=row, **share))
            clocks.append(order.clock(epoch=epoch, row=0))
        shelf = self._source.follow(
            AccessPlan(
                first_clock=np.concatenate([part.first_row + c for part, c in zip(parts, clocks, strict=True)]),
                stop_clock=np.concatenate([part.stop_row + c for part, c in zip(parts, clocks, strict=True)]),
                shard=np.concatenate([part.shard for part in parts]),
                clock=order.clock(epoch=start.epoch, row=start.row),
            )
        )
        return _Reading(self._source, shelf, order, epoch=start.epoch, share=share)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_order": None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What a data set is made of.

    Attributes:
        source: The samples.
        options: Their order.
        delivery: The transform.
        lanes: Lanes that the user asked for, ``None`` if any number will do.
    """

    source: Source
    options: OrderOptions
    delivery: Delivery
    lanes: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batch:
    samples: list[Sample]
    lane: NDArray[np.int64]
    row: NDArray[np.int64]
    number: NDArray[np.int64]


class _Reading:
    """One pass over one epoch of a ``RemoteDataset``."""

    def __init__(self, source: Source, shelf: Shelf, order: SampleOrder, *, epoch: int, share: dict[str, int]) -> None:
        self._source = source
        self._shelf = shelf
        self._order = order
        self._epoch = epoch
        self._share = share
        self._first_number = np.cumsum(source.manifest.num_samples) - source.manifest.num_samples

    def plan(self, rows: Sequence[int]) -> list[Planned]:
        places, edges = self._order.batches(epoch=self._epoch, rows=rows, **self._share)
        count = self._source.num_at_hand(self._shelf, places.shard, edges)
        edges = edges[: count + 1]
        shard, sample = places.shard[: edges[-1]], places.sample[: edges[-1]]
        until = self._order.clock(
            epoch=self._epoch, row=rows[count - 1] + self._order.rows_per_step(self._share["global_batch"])
        )
        batches = self._source.locate(self._shelf, shard, sample, edges, until=until)
        number = self._first_number[shard] + sample
        padded = places.padded if self._order.options.tail == "pad" else None

        def read(batch: int, own: slice) -> _Batch:
            samples = batches.read(batch)
            if padded is not None:
                for content, is_padded in zip(samples, padded[own].tolist(), strict=True):
                    content["__pad__"] = is_padded
            return _Batch(samples=samples, lane=places.lane[own], row=places.row[own], number=number[own])

        return [
            Planned(
                row=row, num_samples=stop - start, size_bytes=size_bytes, read=partial(read, batch, slice(start, stop))
            )
            for batch, (row, (start, stop), size_bytes) in enumerate(
                zip(rows[:count], pairwise(edges.tolist()), batches.size_bytes, strict=True)
            )
        ]

    def advance(self, row: int) -> None:
        self._source.advance(self._shelf, self._order.clock(epoch=self._epoch, row=row))

    def close(self) -> None:
        self._source.let_go(self._shelf)
