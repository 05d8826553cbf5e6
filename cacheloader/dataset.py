"""``RemoteDataset``: samples of remote shards, in an order that needs only a position to go on from."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from cacheloader import state, world
from cacheloader.config import TransportOptions
from cacheloader.cursor import SharedCursor, Start
from cacheloader.errors import ConfigError, DatasetError
from cacheloader.formats import registry
from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder
from cacheloader.protocol.messages import DatasetSpec
from cacheloader.shelf import Shelf
from cacheloader.transport.base import AccessPlan
from cacheloader.transport.open import open_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from cacheloader.formats.base import Sample
    from cacheloader.manifest.record import Manifest
    from cacheloader.order.places import Places
    from cacheloader.transport.base import Transport


class RemoteDataset(IterableDataset[Any]):
    """Samples of shards that lie in an object store, on a web server or on a mounted volume.

    Works under ``cacheloader.DataLoader`` and under torch's own. Each pass over it is one epoch; ranks and workers
    share the epoch between them without talking to each other.

    Args:
        urls: A URL or path, a brace pattern (``"s3://bucket/train-{000000..001023}.tar"``), a glob, a directory, or a
            list of those.
        shuffle: Whether to visit samples in a new order each epoch; ``False`` keeps the data set's order.
        seed: Decides the order together with the epoch.
        transform: Called with each sample, a dict of fields, in the process that reads it; its result is delivered.
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
        transform: Callable[[Sample], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        lanes: int | None = None,
        shuffle_window: int = 8,
        tail: str = "drop",
        redeal: float = 0.0,
        format: str | None = None,  # noqa: A002  (the name is part of the public surface)
        columns: Sequence[str] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        cache_dir: str | Path | None = None,
        cache_size: int | str | None = None,
        daemon: str | None = None,
        timeout_s: float = 300.0,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        super().__init__()
        self.transform = transform
        self._world = world.detect(rank=rank, world_size=world_size)
        self._lanes_are_given = lanes is not None or not shuffle
        self._order_options = OrderOptions(
            seed=seed,
            lanes=lanes if lanes is not None else (self._world.world_size if shuffle else 1),
            shuffle=shuffle,
            shuffle_window=shuffle_window,
            tail=tail,
            redeal=redeal,
        )
        self._batch_size: int | None = None
        if batch_size is not None:
            self.set_batch_size(batch_size)
        self._columns = None if columns is None else tuple(columns)
        self._transport_options = TransportOptions(
            daemon=daemon, cache_dir=cache_dir, cache_size=cache_size, timeout_s=timeout_s
        )
        self._spec = DatasetSpec(
            urls=[os.fspath(url) for url in ([urls] if isinstance(urls, str | os.PathLike) else urls)],
            format=format or "",
            storage_options=dict(storage_options or {}),
        )
        self._cursor = SharedCursor()
        self._pid = -1
        self._transport: Transport | None = None
        self._manifest: Manifest | None = None
        self._order: SampleOrder | None = None
        self._shelf: Shelf | None = None
        self._iterations = 0
        self._digest = ""
        self._digest = self._open(progress)[1].digest

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest:
        """The shards, with sizes, versions and sample counts."""
        return self._open()[1]

    @property
    def num_samples(self) -> int:
        """Samples in the data set, over all ranks."""
        return self._sample_order().num_samples

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
        """Samples that this rank delivers in a full epoch."""
        return self._sample_order().rank_samples_remaining(
            row=0, global_batch=self._global_batch(), rank=self._world.rank, world_size=self._world.world_size
        )

    def num_batches(self) -> int:
        """Batches that every rank delivers in a full epoch."""
        return self._sample_order().steps_remaining(row=0, global_batch=self._global_batch())

    # -- where it stands -------------------------------------------------------------------------------------------

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
        order = self._sample_order()
        start = self._cursor.current or self._cursor.next
        global_batch = self._global_batch()
        row = start.row + batches * order.rows_per_step(global_batch)
        epoch = start.epoch
        if batches and order.steps_remaining(row=row, global_batch=global_batch) == 0:
            epoch, row = epoch + 1, 0
        return state.Position(
            manifest=self._digest, order=state.order_fields(self._order_options), epoch=epoch, row=row
        )

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
            StateMismatch: The position belongs to another data set or order.
        """
        position = state.parse(saved)
        if not self._lanes_are_given and isinstance(position.order.get("lanes"), int):
            self._adopt_lanes(int(position.order["lanes"]))
        here = state.reconcile(
            position,
            state.Position(manifest=self._digest, order=state.order_fields(self._order_options)),
            num_rows=self._sample_order().rows_per_epoch,
            on_mismatch=on_mismatch,
        )
        start = Start(epoch=here.epoch, row=here.row)
        if start.row and self._batch_size is not None and not self._steps_from(start):
            start = Start(epoch=start.epoch + 1, row=0)  # what is left fills no batch of this size
        self._cursor.move_to(start)

    # -- reading ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        seed = 0 if worker is None else worker.seed - worker.id
        start = self._cursor.begin(worker=number, seed=seed, iteration=self._next_iteration(worker is not None))
        return self._read(start, worker=number, num_workers=num_workers)

    def _read(self, start: Start, *, worker: int, num_workers: int) -> Iterator[Any]:
        order = self._sample_order()
        global_batch = self._global_batch(num_workers=num_workers)
        rows = order.worker_rows(row=start.row, global_batch=global_batch, worker=worker, num_workers=num_workers)
        shelf = self._follow(start, global_batch)
        try:
            for row in rows:
                places = order.batch(
                    epoch=start.epoch,
                    row=row,
                    global_batch=global_batch,
                    rank=self._world.rank,
                    world_size=self._world.world_size,
                )
                samples = self._samples(shelf, places)
                shelf.advance(order.clock(epoch=start.epoch, row=row + rows.step))
                transform = self.transform
                if transform is None:
                    yield from samples
                else:
                    for sample in samples:
                        yield transform(sample)
        finally:
            shelf.clear()

    def _samples(self, shelf: Shelf, places: Places) -> list[Sample]:
        """The samples at ``places``, in their order, read shard by shard."""
        samples: list[Sample] = [{}] * len(places.shard)
        by_shard = np.argsort(places.shard, kind="stable")
        edges = np.flatnonzero(np.diff(places.shard[by_shard])) + 1
        for group in np.split(by_shard, edges) if len(by_shard) else ():
            reader = shelf.reader(int(places.shard[group[0]]))
            for place, sample in zip(group, reader.read(places.sample[group]), strict=True):
                samples[place] = sample
        if self._order_options.tail == "pad":
            for sample, padded in zip(samples, places.padded, strict=True):
                sample["__pad__"] = bool(padded)
        return samples

    def _follow(self, start: Start, global_batch: int) -> Shelf:
        """Announce this epoch and the next to the daemon and put up a shelf for this iteration's shards."""
        order = self._sample_order()
        transport, manifest = self._open()
        if self._shelf is not None:
            self._shelf.clear()
        parts = [
            order.accesses(
                epoch=epoch,
                from_row=row,
                global_batch=global_batch,
                rank=self._world.rank,
                world_size=self._world.world_size,
            )
            for epoch, row in ((start.epoch, start.row), (start.epoch + 1, 0))
        ]
        epoch_clock = [order.clock(epoch=start.epoch + i, row=0) for i in range(2)]
        plan = AccessPlan(
            first_clock=np.concatenate([part.first_row + c for part, c in zip(parts, epoch_clock, strict=True)]),
            stop_clock=np.concatenate([part.stop_row + c for part, c in zip(parts, epoch_clock, strict=True)]),
            shard=np.concatenate([part.shard for part in parts]),
            clock=order.clock(epoch=start.epoch, row=start.row),
        )
        transport.follow(plan)
        shelf = self._shelf = Shelf(
            transport=transport,
            manifest=manifest,
            plan=plan,
            shard_format=registry.named(manifest.format),
            columns=self._columns,
        )
        return shelf

    # -- pieces that belong to one process ---------------------------------------------------------------------------

    def _forget_process(self) -> None:
        self._pid = os.getpid()
        self._transport = self._manifest = self._order = self._shelf = None
        self._iterations = 0

    def _open(self, progress: Callable[[str, int, int], None] | None = None) -> tuple[Transport, Manifest]:
        if self._pid != os.getpid():
            self._leave_parent()
        if self._transport is None or self._manifest is None:
            self._transport = open_transport(self._transport_options)
            self._manifest = self._transport.open_dataset(self._spec, digest=self._digest, progress=progress)
        return self._transport, self._manifest

    def _leave_parent(self) -> None:
        # A forked worker: the order is good as it is, the connection is the parent's.
        transport, order = self._transport, self._order
        self._forget_process()
        self._order = order
        if transport is not None:
            transport.close()

    def _sample_order(self) -> SampleOrder:
        if self._order is None:
            manifest = self.manifest
            self._order = SampleOrder(manifest.num_samples, self._order_options)
            if self._order.num_samples == 0:
                raise DatasetError(f"the data set {self._spec.urls[0]} has no samples")
        return self._order

    def _steps_from(self, start: Start) -> int:
        return self._sample_order().steps_remaining(row=start.row, global_batch=self._global_batch())

    def _adopt_lanes(self, lanes: int) -> None:
        if lanes != self._order_options.lanes:
            self._order_options = replace(self._order_options, lanes=lanes)
            self._order = None

    def _next_iteration(self, in_worker: bool) -> int:  # noqa: FBT001
        if self._pid != os.getpid():
            self._leave_parent()
        self._iterations += 1
        return self._iterations if in_worker else -self._iterations

    def _global_batch(self, *, num_workers: int = 1) -> int:
        if self._batch_size is not None:
            return self._batch_size * self._world.world_size
        if self._world.world_size == 1 and self._order_options.lanes == 1 and num_workers == 1:
            return 1  # one lane read by one process: the order is the same for every batch size
        raise ConfigError(
            f"batch_size is unknown to the data set, and its order over world_size={self._world.world_size}, "
            f"lanes={self._order_options.lanes} and {num_workers} workers depends on it; pass "
            "RemoteDataset(batch_size=…) with the loader's batch size, or use cacheloader.DataLoader"
        )

    def __getstate__(self) -> dict[str, Any]:
        fields = self.__dict__.copy()
        for name in ("_transport", "_manifest", "_order", "_shelf"):
            fields[name] = None
        fields["_iterations"] = 0
        fields["_pid"] = -1
        return fields
