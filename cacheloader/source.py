"""One data set as one process reads it: the session with its daemon, the manifest, and the shards it holds."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from cacheloader.errors import ConfigError
from cacheloader.formats import registry
from cacheloader.order.distinct import distinct
from cacheloader.shelf import Shelf
from cacheloader.stretch import ShardPart, Stretch
from cacheloader.transport.open import open_transport
from cacheloader.transport.reporting import FetchReporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from cacheloader.config import TransportOptions
    from cacheloader.formats.base import RangeReader, Sample
    from cacheloader.manifest.record import Manifest
    from cacheloader.protocol.messages import DatasetSpec
    from cacheloader.transport.base import AccessPlan, Transport

_PATIENCE_S = 0.1


class Batches(Protocol):
    """Batches whose samples are at hand."""

    @property
    def size_bytes(self) -> list[int]:
        """Bytes of the values of each batch, 0 where that is not known."""
        ...

    def read(self, batch: int) -> list[Sample]:
        """The samples of one of them, in place order; any thread may call this."""
        ...


class Source:
    """Shards to samples. Pickles small, and opens itself anew in every process that uses it.

    Args:
        spec: What to read.
        transport_options: How to get it.
        columns: Fields to read, all if ``None``.
        progress: Called with (stage, done, total) while the data set is resolved, which happens here.

    Attributes:
        digest: Digest of the manifest; other processes accept no other.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        *,
        transport_options: TransportOptions,
        columns: Sequence[str] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._spec = spec
        self._transport_options = transport_options
        self._columns = None if columns is None else tuple(columns)
        self._pid = os.getpid()
        self._transport: Transport | None = None
        self._manifest: Manifest | None = None
        self._shelf: Shelf | None = None
        self._in_use = threading.Lock()
        self.digest = ""
        self.digest = self._open(progress)[1].digest

    @property
    def manifest(self) -> Manifest:
        """The shards, with sizes, versions and sample counts."""
        return self._open()[1]

    def fetch_reporter(self) -> FetchReporter:
        """A way to tell the daemon of this source how long the training loop waits."""
        return FetchReporter(self._transport_options)

    def follow(self, plan: AccessPlan) -> Shelf:
        """Begin an iteration: give back what an earlier one still holds and announce the coming accesses.

        Returns:
            What the iteration holds, for ``let_go``.
        """
        self._open()  # in a forked child this forgets what is the parent's
        self.let_go()
        transport, manifest = self._open()
        with self._in_use:  # the collector may be giving back, in another thread, what was held before
            transport.follow(plan)
        self._shelf = Shelf(
            transport=transport,
            manifest=manifest,
            plan=plan,
            shard_format=registry.named(manifest.format),
            columns=self._columns,
        )
        return self._shelf

    @property
    def is_ranges(self) -> bool:
        """Whether samples are plain byte ranges of shards, see ``ShardFormat``."""
        return registry.named(self.manifest.format).is_ranges

    def num_at_hand(self, shelf: Shelf, shard: NDArray[np.int32], edges: NDArray[np.int64]) -> int:
        """How many batches need no shard that would have to be waited for, beyond those that the first one needs.

        Args:
            shelf: From ``follow``.
            shard: int32 [n]; index in the manifest, batch by batch.
            edges: int64 [batches + 1]; where each batch starts.
        """
        first = set(shard[: edges[1]].tolist())
        absent = {one for one in distinct(shard).tolist() if one not in first and not shelf.holds(one)}
        if not absent:
            return len(edges) - 1
        at = next(place for place, one in enumerate(shard.tolist()) if one in absent)
        return int(np.searchsorted(edges, at, side="right")) - 1

    def locate(
        self,
        shelf: Shelf,
        shard: NDArray[np.int32],
        sample: NDArray[np.int64],
        edges: NDArray[np.int64],
        *,
        until: int,
    ) -> Batches:
        """Batches of samples, ready to be read; their shards are waited for.

        Args:
            shelf: From ``follow``.
            shard: int32 [n]; index in the manifest, batch by batch.
            sample: int64 [n]; index in the shard.
            edges: int64 [batches + 1]; where each batch starts.
            until: Clock at which the last of them is done.
        """
        with self._by_one_thread(shelf):
            by_shard = np.argsort(shard, kind="stable")
            groups = np.split(by_shard, np.flatnonzero(np.diff(shard[by_shard])) + 1) if len(by_shard) else []
            if not self.is_ranges:
                samples: list[Sample] = [{}] * len(shard)
                for group in groups:
                    contents = shelf.reader(int(shard[group[0]])).read(sample[group])
                    for place, content in zip(group.tolist(), contents, strict=True):
                        samples[place] = content
                return _Read(samples, edges)
            parts = []
            for group in groups:
                number = int(shard[group[0]])
                reader = cast("RangeReader", shelf.reader(number))
                shelf.keep(number, until)
                parts.append(
                    ShardPart(
                        read_each=shelf.lease(number).read_each, place=group, located=reader.locate(sample[group])
                    )
                )
            return Stretch(parts, edges)

    def advance(self, shelf: Shelf, clock: int) -> None:
        """Every row before ``clock`` is done: give back shards that no later row needs."""
        if self._shelf is shelf:
            with self._by_one_thread(shelf):
                shelf.advance(clock)

    def let_go(self, shelf: Shelf | None = None) -> None:
        """Give back every shard; calling it again does nothing.

        Args:
            shelf: Only if this is still the iteration under way: an iterator that was left behind ends some time, and
                must not take the shards of the one that followed it.
        """
        mine = self._shelf
        if mine is None or shelf not in (None, mine):
            return
        self._shelf = None
        if self._in_use.acquire(timeout=_PATIENCE_S):
            try:
                mine.clear()
            finally:
                self._in_use.release()
        else:
            # A thread that reads ahead waits for a shard, maybe for minutes. Leave it the session, which it closes when
            # the wait is over, and open another.
            self._transport, self._in_use = None, threading.Lock()

    @contextmanager
    def _by_one_thread(self, shelf: Shelf) -> Iterator[None]:
        # One connection serves one thread: a second one would wait for answers that the first has taken.
        in_use, transport = self._in_use, self._transport
        # An iteration that is no longer the one under way finds that out with the lock held, and is soon gone.
        if not in_use.acquire(timeout=_PATIENCE_S):
            raise ConfigError("two threads read one data set at once; open a data set, or a loader, for each of them")
        try:
            if self._shelf is not shelf:
                raise ConfigError(
                    "another iteration of this data set has begun in this process and this one no longer counts; "
                    "go on with the newer one, or open a data set for each"
                )
            yield
        finally:
            in_use.release()
            if self._in_use is not in_use:  # let go of in the meantime
                shelf.clear()
                if transport is not None:
                    transport.close()

    def _open(self, progress: Callable[[str, int, int], None] | None = None) -> tuple[Transport, Manifest]:
        if self._pid != os.getpid():
            self._leave_parent()
        if self._transport is None or self._manifest is None:
            self._transport = open_transport(self._transport_options)
            self._manifest = self._transport.open_dataset(self._spec, digest=self.digest, progress=progress)
        return self._transport, self._manifest

    def _leave_parent(self) -> None:
        transport, self._transport = self._transport, None  # the connection is the parent's
        self._pid = os.getpid()
        self._manifest = self._shelf = None
        self._in_use = threading.Lock()  # another thread of the parent may have held it
        if transport is not None:
            transport.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_transport": None, "_manifest": None, "_shelf": None, "_in_use": None, "_pid": -1}


class _Read:
    """Batches of a format whose samples have to be computed; that is done."""

    def __init__(self, samples: list[Sample], edges: NDArray[np.int64]) -> None:
        self._samples = samples
        self._edges = edges.tolist()
        self.size_bytes = [0] * (len(edges) - 1)

    def read(self, batch: int) -> list[Sample]:
        return self._samples[self._edges[batch] : self._edges[batch + 1]]
