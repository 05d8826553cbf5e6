"""``Mixture``: several data sets as one, in exact proportions, with one position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheloader import state
from cacheloader.ahead import Planned
from cacheloader.dataset import Parts, RemoteDataset
from cacheloader.delivery import SKIP, Delivered, OnBadSample
from cacheloader.errors import ConfigError
from cacheloader.order import mixture_record
from cacheloader.order.draws import place_words
from cacheloader.order.mixture_order import MixtureOrder
from cacheloader.order.mixture_schedule import WeightsFrom, phases_of
from cacheloader.order.mixture_shares import MIXTURE_VERSION, Shares
from cacheloader.order.mixture_sources import MixtureSources
from cacheloader.order.options import ORDER_VERSION, OrderOptions
from cacheloader.positioned import Batch, PositionedDataset
from cacheloader.transport.base import AccessPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from cacheloader.cursor import Start
    from cacheloader.formats.base import Sample
    from cacheloader.order.mixture_shares import Phase
    from cacheloader.order.mixture_sources import MixtureBatch
    from cacheloader.shelf import Shelf
    from cacheloader.source import Batches, Source
    from cacheloader.transport.reporting import FetchReporter

# What ``place_words`` calls the epoch: rows of a mixture run on through all epochs, and two transforms see each sample.
_MEMBERS_DRAWS, _MIXTURE_DRAWS = 0, 1


class Mixture(PositionedDataset):
    """Samples of several data sets in exact proportions.

    In every block of 4,096 rows each source has its exact share, rounded to whole samples and never one sample off
    over any number of blocks. Each source keeps epochs of its own: all its samples come once before one comes again.
    Position, ranks, workers and resuming are those of ``RemoteDataset``.

    Args:
        sources: By name, a ``RemoteDataset`` and its weight; only the ratios of weights matter. A source's transform is
            applied to its samples; its batch size, tail, rank and world size are not used, and its order is that of
            the mixture's lanes. Read it through the mixture alone.
        seed: Decides where in a block the sources lie. Inside each source the order is that of its own seed.
        transform: Called as that of ``RemoteDataset``, with what the transform of the source has returned.
        schedule: Changes of weights. Changes that lie ahead may be added between two starts of a job.
        epoch_samples: Samples of one pass, over all ranks, rounded up to whole rows; by default as many as the sources
            hold together. A length only: what the sources read next does not depend on it.
        source_field: A field of each sample, a dict, to hold the name of its source; none by default.
        batch_size: Samples per batch and rank. ``cacheloader.DataLoader`` sets it.
        lanes: As in ``RemoteDataset``; by default those that sources were given, else the world size. A source with
            ``shuffle=False`` has one lane, and so has its mixture.
        tail: ``"carry"`` lets a step that does not fit into the epoch go on into the next, which then starts behind it:
            every batch is full. ``"keep"`` makes it smaller. Neither loses a sample.
        on_bad_sample: What happens when ``transform`` raises; the transforms of the sources have their own setting.
        max_bad_samples: As in ``RemoteDataset``.
        rank: As in ``RemoteDataset``.
        world_size: As in ``RemoteDataset``.

    Raises:
        ConfigError: The sources, weights or options cannot work together.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[RemoteDataset, float]],
        *,
        seed: int = 0,
        transform: Callable[..., Any] | None = None,
        schedule: Sequence[WeightsFrom] = (),
        epoch_samples: int | None = None,
        source_field: str | None = None,
        batch_size: int | None = None,
        lanes: int | None = None,
        tail: str = "carry",
        on_bad_sample: OnBadSample = "raise",
        max_bad_samples: int = 100,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(
            transform=transform,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            on_bad_sample=on_bad_sample,
            max_bad_samples=max_bad_samples,
        )
        _check_sources(sources)
        self._names = sorted(sources)  # the order in which they are written down decides nothing
        self._parts = [sources[name][0].parts() for name in self._names]
        self._weights = {name: sources[name][1] for name in self._names}
        self._schedule = tuple(schedule)
        self._mixture_seed = seed
        self._source_field = source_field
        self._tail = tail
        given = _given_lanes(lanes, dict(zip(self._names, self._parts, strict=True)))
        self._lanes_are_given = given is not None
        options = OrderOptions(seed=seed, lanes=self._world.world_size if given is None else given)
        self._lanes = options.lanes
        self._epoch_samples = epoch_samples if epoch_samples is not None else self.num_samples
        if not isinstance(self._epoch_samples, int) or self._epoch_samples < 1:
            raise ConfigError(
                f"epoch_samples={epoch_samples!r} is no whole number from 1; leave it out for all samples"
            )
        self._built: MixtureSources | None = None
        self._record: state.Position | None = None
        self._orders()  # what cannot work fails here

    @property
    def num_samples(self) -> int:
        """Samples that the sources hold together."""
        return sum(int(parts.source.manifest.num_samples.sum()) for parts in self._parts)

    def shards_at(self, *, epoch: int, row: int) -> list[str]:
        """URIs of the shards that this rank reads in the step that starts at ``row``."""
        batch = self._orders().batch(epoch=epoch, row=row, **self._share(self.global_batch()))
        return [
            self._parts[own.source].source.manifest.uri(shard)
            for own in batch.by_source
            for shard in np.unique(own.shard).tolist()
        ]

    @property
    def is_raw(self) -> bool:
        """Whether samples are delivered as they lie in the shards, without any computing."""
        deliveries = [self._delivery, *(parts.delivery for parts in self._parts)]
        return all(parts.source.is_ranges for parts in self._parts) and not any(one.has_transform for one in deliveries)

    @property
    def _seed(self) -> int:
        return self._mixture_seed

    @property
    def _is_one_sequence(self) -> bool:
        return self._lanes == 1

    def _steps(self) -> MixtureOrder:
        return self._orders().order

    def _orders(self) -> MixtureSources:
        if self._built is None:
            self._built = self._orders_of(self._lanes)
        return self._built

    def _orders_of(self, lanes: int) -> MixtureSources:
        parts = dict(zip(self._names, self._parts, strict=True))
        order = MixtureOrder(
            Shares(self._phases(lanes)),
            seed=self._mixture_seed,
            lanes=lanes,
            epoch_rows=self._epoch_rows(lanes),
            tail=self._tail,
        )
        return MixtureSources(
            order,
            samples_per_shard={name: part.source.manifest.num_samples for name, part in parts.items()},
            options={name: part.options for name, part in parts.items()},
        )

    def _epoch_rows(self, lanes: int) -> int:
        return -(-self._epoch_samples // lanes)

    def _phases(self, lanes: int) -> tuple[Phase, ...]:
        return phases_of(self._weights, self._schedule, names=self._names, lanes=lanes)

    def fetch_reporter(self) -> FetchReporter:
        """A way to tell the node's daemon, that of the first source, how long the training loop waits."""
        return self._parts[0].source.fetch_reporter()

    # Position.

    def _identity(self, saved: state.Position | None) -> state.Position:
        if self._record is None:
            self._record = self._record_of(self._lanes)
        lanes = self._lanes if saved is None or self._lanes_are_given else saved.order.get("lanes")
        if lanes == self._lanes or not isinstance(lanes, int) or lanes < 1:
            return self._record
        return self._record_of(lanes)

    def _record_of(self, lanes: int) -> state.Position:
        phases = self._phases(lanes)
        manifests = [parts.source.manifest for parts in self._parts]
        return state.Position(
            manifest=mixture_record.manifests_text(self._names, [manifest.digest for manifest in manifests]),
            order={
                "seed": self._mixture_seed,
                "lanes": lanes,
                "tail": self._tail,
                "epoch_rows": self._epoch_rows(lanes),
                "weights": mixture_record.weights_text(self._names, phases[0].weights),
                "schedule": mixture_record.schedule_text(self._names, phases),
                "sources": mixture_record.sources_text(self._names, [parts.options for parts in self._parts]),
                "layout": mixture_record.layout_text([manifest.num_samples for manifest in manifests]),
                "order_version": ORDER_VERSION,
                "mixture_version": MIXTURE_VERSION,
            },
        )

    def _reconciled(
        self, position: state.Position, on_mismatch: Mapping[str, state.Policy] | None = None
    ) -> state.Position:
        ours = self._identity(position).order
        saved, lanes, epoch_rows = position.order.get("schedule"), ours["lanes"], position.order.get("epoch_rows")
        if isinstance(saved, str) and isinstance(lanes, int) and isinstance(epoch_rows, int):
            row = position.epoch * epoch_rows + position.row
            if mixture_record.is_earlier_schedule(saved, names=self._names, phases=self._phases(lanes), row=row):
                position = replace(position, order={**position.order, "schedule": ours["schedule"]})
        return super()._reconciled(position, on_mismatch)

    def _adopt(self, position: state.Position) -> None:
        lanes = int(position.order["lanes"])
        if lanes != self._lanes:
            self._built = self._orders_of(lanes)
            self._lanes, self._record = lanes, None

    # Reading.

    def _share(self, global_batch: int) -> dict[str, int]:
        return {"global_batch": global_batch, "rank": self._world.rank, "world_size": self._world.world_size}

    def _begin(self, start: Start, global_batch: int) -> _Reading:
        orders, share = self._orders(), self._share(global_batch)
        clock = orders.order.clock(epoch=start.epoch, row=start.row)
        accesses = orders.accesses(epoch=start.epoch, from_row=start.row, **share)
        shelves = [
            parts.source.follow(
                AccessPlan(first_clock=own.first_row, stop_clock=own.stop_row, shard=own.shard, clock=clock)
            )
            for parts, own in zip(self._parts, accesses, strict=True)
        ]
        return _Reading(
            [parts.source for parts in self._parts],
            shelves,
            orders,
            epoch=start.epoch,
            share=share,
            labels=[{self._source_field: name} for name in self._names] if self._source_field is not None else [],
        )

    def _deliver(self, batch: Batch, *, epoch: int) -> Delivered:  # noqa: ARG002  (rows run on through all epochs)
        assert isinstance(batch, _Batch)
        place: dict[str, Any] = {"seed": self._mixture_seed, "lane": batch.lane, "row": batch.row}
        words = place_words(epoch=_MEMBERS_DRAWS, **place)
        results: list[Any] = [SKIP] * len(batch.samples)
        num_bad = 0
        for source, parts in enumerate(self._parts):
            own = np.flatnonzero(batch.source == source)
            made, bad = parts.delivery.apply([batch.samples[at] for at in own.tolist()], words[own])
            num_bad += bad
            for at, result in zip(own.tolist(), made, strict=True):
                results[at] = result
        left = [at for at, result in enumerate(results) if result is not SKIP]
        words = place_words(epoch=_MIXTURE_DRAWS, **place)
        delivered = self._delivery.deliver([results[at] for at in left], words[left])
        num_skipped = len(results) - len(left) - num_bad
        return replace(delivered, num_skipped=delivered.num_skipped + num_skipped, num_bad=delivered.num_bad + num_bad)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_built": None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batch:
    samples: list[Sample]
    lane: NDArray[np.int64]
    row: NDArray[np.int64]
    number: NDArray[np.int64]
    source: NDArray[np.int64]


class _Reading:
    """One pass over one epoch of a mixture."""

    def __init__(
        self,
        sources: list[Source],
        shelves: list[Shelf],
        orders: MixtureSources,
        *,
        epoch: int,
        share: dict[str, int],
        labels: list[dict[str, str]],
    ) -> None:
        self._sources = sources
        self._shelves = shelves
        self._orders = orders
        self._epoch = epoch
        self._share = share
        self._labels = labels
        # Samples are numbered through the manifests of all sources.
        counts = [source.manifest.num_samples for source in sources]
        passed = np.cumsum([0, *(int(count.sum()) for count in counts[:-1])])
        self._first_number = [
            start + np.cumsum(count) - count for start, count in zip(passed.tolist(), counts, strict=True)
        ]

    def plan(self, rows: Sequence[int]) -> list[Planned]:
        batches = [self._orders.batch(epoch=self._epoch, row=row, **self._share) for row in rows]
        owned = [{own.source: own for own in batch.by_source} for batch in batches]
        located: dict[int, Batches] = {}
        asked = []
        for number, (source, shelf) in enumerate(zip(self._sources, self._shelves, strict=True)):
            of_each = [own.get(number) for own in owned]
            edges = np.cumsum([0, *(0 if own is None else len(own.shard) for own in of_each)])
            if edges[-1]:
                shard = np.concatenate([own.shard for own in of_each if own is not None])
                sample = np.concatenate([own.sample for own in of_each if own is not None])
                asked.append((number, source, shelf, shard, sample, edges))
        at_hand = [source.num_at_hand(shelf, shard, edges) for _, source, shelf, shard, _, edges in asked]
        count = min(at_hand, default=len(rows))
        order = self._orders.order
        until = order.clock(epoch=self._epoch, row=rows[count - 1] + order.rows_per_step(self._share["global_batch"]))
        for number, source, shelf, shard, sample, edges in asked:
            stop = edges[count]
            located[number] = source.locate(shelf, shard[:stop], sample[:stop], edges[: count + 1], until=until)
        return [
            Planned(
                row=row,
                num_samples=len(batch.row),
                size_bytes=sum(one.size_bytes[at] for one in located.values()),
                read=partial(self._read, at, batch, located),
            )
            for at, (row, batch) in enumerate(zip(rows[:count], batches[:count], strict=True))
        ]

    def _read(self, at: int, batch: MixtureBatch, located: Mapping[int, Batches]) -> _Batch:
        samples: list[Sample] = [{}] * len(batch.row)
        number = np.empty(len(batch.row), dtype=np.int64)
        for own in batch.by_source:
            number[own.place] = self._first_number[own.source][own.shard] + own.sample
            label = self._labels[own.source] if self._labels else {}
            for place, content in zip(own.place.tolist(), located[own.source].read(at), strict=True):
                content.update(label)
                samples[place] = content
        return _Batch(samples=samples, lane=batch.lane, row=batch.row, number=number, source=batch.source)

    def advance(self, row: int) -> None:
        clock = self._orders.order.clock(epoch=self._epoch, row=row)
        for source, shelf in zip(self._sources, self._shelves, strict=True):
            source.advance(shelf, clock)

    def close(self) -> None:
        for source, shelf in zip(self._sources, self._shelves, strict=True):
            source.let_go(shelf)


def _check_sources(sources: Mapping[str, tuple[RemoteDataset, float]]) -> None:
    if not isinstance(sources, Mapping):
        raise ConfigError(
            f'the sources of a mixture are {type(sources).__name__}; pass a dict such as {{"web": (dataset, 0.7), …}}'
        )
    if not sources:
        raise ConfigError("a mixture of no sources has no samples; pass at least one")
    seen: dict[int, str] = {}
    for name, source in sources.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f'the source name {name!r} is no text; name each source, such as "web"')
        if not isinstance(source, tuple) or len(source) != 2 or not isinstance(source[0], RemoteDataset):
            raise ConfigError(f"source {name!r} is {source!r}; pass (RemoteDataset, weight)")
        other = seen.setdefault(id(source[0]), name)
        if other != name:
            raise ConfigError(
                f"sources {other!r} and {name!r} are one RemoteDataset object, which has but one connection and one "
                "place; make a second one from the same URLs, or one source with the sum of the weights"
            )


def _given_lanes(lanes: int | None, parts: Mapping[str, Parts]) -> int | None:
    given = {name: part.lanes for name, part in parts.items() if part.lanes is not None}
    wanted = {"the mixture": lanes, **given} if lanes is not None else given
    if len(set(wanted.values())) > 1:
        told = ", ".join(f"{name}: {number}" for name, number in wanted.items())
        raise ConfigError(
            f"all sources of a mixture have its lanes, and different ones are asked for ({told}; a source with "
            "shuffle=False has one); pass lanes= to the mixture alone"
        )
    return next(iter(wanted.values()), None)
