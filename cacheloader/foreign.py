"""Loaders of other libraries that would deal out samples which have been dealt out already."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from cacheloader.world import World


def refuse_second_deal(dataset: object, world: World) -> None:
    """Called at the start of an epoch by those who announce it, which accelerate's loaders do.

    Of an ``IterableDataset`` they assume that each rank sees all samples. One rank's share would be cut again, and the
    job would train on a part of the data without a word.

    Raises:
        ConfigError: ``dataset`` is one rank's share of many and is being iterated by such a loader.
    """
    if world.world_size == 1 or "accelerate.state" not in sys.modules:
        return
    loader = sys.modules["accelerate.state"].GradientState().active_dataloader
    below = getattr(loader, "dataset", None)
    dispatches = type(loader).__name__ == "DataLoaderDispatcher" and below is dataset
    shards = type(below).__name__ == "IterableDatasetShard" and getattr(below, "dataset", None) is dataset
    if dispatches or shards:
        raise ConfigError(
            f"accelerate would deal the samples of rank {world.rank} to all ranks, but the data set has dealt them to "
            f"{world.world_size} ranks already; do not pass the loader to prepare(): iterate cacheloader.DataLoader "
            "itself and keep its position with register_for_checkpointing(loader)"
        )
