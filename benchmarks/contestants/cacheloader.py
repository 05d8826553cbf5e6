"""The product, as a user would write it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import OPENED
from benchmarks.peers.keyed_batches import KeyedBatches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.meter import PhaseClock
    from benchmarks.harness.packing import PackedShards

SEED = 17


class CacheloaderLoader(KeyedBatches):
    """``cl.DataLoader`` over a ``cl.RemoteDataset`` with a private daemon in the run's own directory.

    Args:
        decode: Whether a transform turns each payload into pixels.
        seed: Of the order.
    """

    is_cached = True
    key_field = "__key__"

    def __init__(self, *, decode: bool = False, seed: int = SEED) -> None:
        super().__init__(decode=decode)
        self._seed = seed

    def prepare(self, task: Task) -> None:
        """Import."""
        import cacheloader

        self._workers = task.num_workers
        _ = cacheloader.RemoteDataset, cacheloader.DataLoader  # exported lazily
        if self._decode:
            import benchmarks.peers.decoding  # noqa: F401

    def open(self, task: Task, clock: PhaseClock) -> Iterable[Any]:
        """Start the daemon, resolve the data set, make the loader."""
        import cacheloader as cl

        origin = task.store
        url, storage_options = task.source_folder, None
        if origin is not None:
            url = f"s3://{origin.bucket}/{origin.prefix}"
            storage_options = origin.storage_options
        transform = None
        if self._decode:
            from benchmarks.peers.decoding import decoded_sample as transform
        dataset = cl.RemoteDataset(
            url,
            transform=transform,
            seed=self._seed,
            storage_options=storage_options,
            cache_dir=Path(task.folder, "cache"),
            cache_size=4 * sum(task.shard_bytes),
        )
        clock.mark(OPENED)
        loader: Iterable[Any] = cl.DataLoader(
            dataset,
            batch_size=task.batch_size,
            num_workers=task.num_workers,
            persistent_workers=task.num_workers > 0,
        )
        return loader

    def close(self) -> None:
        """The runner ends the daemon with everything else that a run leaves."""

    @property
    def configuration(self) -> dict[str, Any]:
        """How it was set up."""
        return {
            "loader": "cl.DataLoader(RemoteDataset), defaults, private daemon, shuffled",
            # No transform: nothing to compute, so the product starts no processes, whatever num_workers says.
            "workers": f"num_workers={self._workers}: {max(2, self._workers)} reading threads, no processes",
            "batch": "default collate: dict of lists of bytes",
        }


def reads_of_epoch(packed: PackedShards, *, epoch: int, batch_size: int) -> list[list[tuple[int, int, int]]]:
    """What the product reads in one epoch: batches of (shard, first byte, end) in its own order."""
    import numpy as np

    from cacheloader.order.options import OrderOptions
    from cacheloader.order.sample_order import SampleOrder

    options = OrderOptions(seed=SEED, lanes=1, shuffle=True, shuffle_window=8, tail="drop", redeal=0.0)
    order = SampleOrder(np.array(packed.samples_per_shard, dtype=np.int64), options)
    batches = []
    for row in order.worker_rows(row=0, global_batch=batch_size, worker=0, num_workers=1):
        places = order.batch(epoch=epoch, row=row, global_batch=batch_size, rank=0, world_size=1)
        batches.append(
            [
                (shard, *packed.members[shard][sample])
                for shard, sample in zip(places.shard.tolist(), places.sample.tolist(), strict=True)
            ]
        )
    return batches
