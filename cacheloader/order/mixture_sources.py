"""The samples of a mixture: its places, each in the own order of its source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.errors import ConfigError
from cacheloader.order.mixture_accesses import source_accesses
from cacheloader.order.sample_order import SampleOrder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from cacheloader.order.mixture_order import MixtureOrder
    from cacheloader.order.options import OrderOptions
    from cacheloader.order.places import Accesses


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourcePlaces:
    """The samples of one source in a rank's batch.

    Attributes:
        source: Number of the source.
        place: int64 [n]; places in the batch.
        shard: int32 [n]; index in the source's manifest.
        sample: int64 [n]; index inside the shard.
    """

    source: int
    place: NDArray[np.int64]
    shard: NDArray[np.int32]
    sample: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureBatch:
    """One rank's batch. All arrays have one entry a sample, in place order.

    Attributes:
        source: int64 [n]; number of the source.
        lane: int64 [n].
        row: int64 [n]; row of the lane, counted from the beginning of the run.
        by_source: The samples, source by source.
    """

    source: NDArray[np.int64]
    lane: NDArray[np.int64]
    row: NDArray[np.int64]
    by_source: list[SourcePlaces]


class MixtureSources:
    """A mixture and the orders of its sources.

    In a lane that holds n samples of a source, the source's turn t is row t mod n of its own epoch t div n.

    Args:
        order: Which source lies where.
        samples_per_shard: By name of the source, in the mixture's order of sources; each int64 [shards].
        options: Of each source; the lanes are those of the mixture whatever these say.

    Attributes:
        order: As given.

    Raises:
        ConfigError: A source has fewer samples than lanes, or cannot have these lanes.
    """

    def __init__(
        self,
        order: MixtureOrder,
        *,
        samples_per_shard: Mapping[str, NDArray[np.int64]],
        options: Mapping[str, OrderOptions],
    ) -> None:
        self.order = order
        self._sources = [
            SampleOrder(counts, replace(options[name], lanes=order.lanes)) for name, counts in samples_per_shard.items()
        ]
        for name, own in zip(samples_per_shard, self._sources, strict=True):
            if own.num_samples < order.lanes:
                raise ConfigError(
                    f"source {name!r} holds {own.num_samples} samples and the mixture has {order.lanes} lanes, each of "
                    "which needs one; pass fewer lanes= (any world size can read them) or leave the source out"
                )

    def batch(self, *, epoch: int, row: int, global_batch: int, rank: int, world_size: int) -> MixtureBatch:
        """One rank's samples of the step that starts at ``row``; arguments and errors as in ``SampleOrder.batch``."""
        share = {"global_batch": global_batch, "rank": rank, "world_size": world_size}
        places = self.order.batch(epoch=epoch, row=row, **share)
        lanes = self.order.lanes_of(**share)
        by_source = []
        for source in np.unique(places.source).tolist():
            at = np.flatnonzero(places.source == source)
            shard, sample = self._located(source, places.lane[at], places.turn[at], *lanes)
            by_source.append(SourcePlaces(source=source, place=at, shard=shard, sample=sample))
        return MixtureBatch(source=places.source, lane=places.lane, row=places.row, by_source=by_source)

    def accesses(
        self, *, epoch: int, from_row: int, global_batch: int, rank: int, world_size: int
    ) -> Iterator[Accesses]:
        """What a rank reads of each source in the rest of an epoch and the next; see ``source_accesses``.

        Args:
            epoch: 0 or more.
            from_row: Rows consumed in the epoch. The accesses' rows count from the beginning of the run.
            global_batch: Samples of one step over all ranks.
            rank: ``[0, world_size)``.
            world_size: Ranks.
        """
        order = self.order
        first_lane, stop_lane = order.lanes_of(global_batch=global_batch, rank=rank, world_size=world_size)
        start = order.clock(epoch=epoch, row=from_row)
        stop = (epoch + 2) * order.rows_per_epoch + order.rows_per_step(global_batch)
        for source, own in enumerate(self._sources):
            yield source_accesses(
                order.shares,
                source,
                own,
                from_row=start,
                stop_row=max(stop, start + 1),
                first_lane=first_lane,
                stop_lane=stop_lane,
            )

    def _located(
        self, source: int, lane: NDArray[np.int64], turn: NDArray[np.int64], first_lane: int, stop_lane: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        own = self._sources[source]
        epoch, row = np.divmod(turn, own.lane_lengths(first_lane, stop_lane)[lane - first_lane])
        shard, sample = np.empty(len(turn), dtype=np.int32), np.empty(len(turn), dtype=np.int64)
        for one in np.unique(epoch).tolist():
            at = np.flatnonzero(epoch == one)
            shard[at], sample[at] = own.locate(
                epoch=one, lane=lane[at], row=row[at], first_lane=first_lane, stop_lane=stop_lane
            )
        return shard, sample
