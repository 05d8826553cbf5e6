"""One data set as one process reads it: the session with its daemon, the manifest, and the shards it holds."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheloader.errors import ConfigError
from cacheloader.formats import registry
from cacheloader.shelf import Shelf
from cacheloader.transport.open import open_transport
from cacheloader.transport.reporting import FetchReporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from cacheloader.config import TransportOptions
    from cacheloader.formats.base import Sample
    from cacheloader.manifest.record import Manifest
    from cacheloader.protocol.messages import DatasetSpec
    from cacheloader.transport.base import AccessPlan, Transport


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
        transport, manifest = self._open()
        self.let_go()
        transport.follow(plan)
        self._shelf = Shelf(
            transport=transport,
            manifest=manifest,
            plan=plan,
            shard_format=registry.named(manifest.format),
            columns=self._columns,
        )
        return self._shelf

    def read(self, shard: NDArray[np.int32], sample: NDArray[np.int64]) -> list[Sample]:
        """Samples in the order asked for, read shard by shard.

        Args:
            shard: int32 [n]; index in the manifest.
            sample: int64 [n]; index in the shard.
        """
        with self._by_one_thread():
            return self._read(shard, sample)

    def _read(self, shard: NDArray[np.int32], sample: NDArray[np.int64]) -> list[Sample]:
        if self._shelf is None:
            raise ConfigError(
                "another iteration of this data set has begun in this process and this one no longer counts; "
                "go on with the newer one, or open a data set for each"
            )
        samples: list[Sample] = [{}] * len(shard)
        by_shard = np.argsort(shard, kind="stable")
        edges = np.flatnonzero(np.diff(shard[by_shard])) + 1
        for group in np.split(by_shard, edges) if len(by_shard) else ():
            reader = self._shelf.reader(int(shard[group[0]]))
            for place, content in zip(group.tolist(), reader.read(sample[group]), strict=True):
                samples[place] = content
        return samples

    def advance(self, clock: int) -> None:
        """Every row before ``clock`` is done: give back shards that no later row needs."""
        if self._shelf is not None:
            self._shelf.advance(clock)

    def let_go(self, shelf: Shelf | None = None) -> None:
        """Give back every shard; calling it again does nothing.

        Args:
            shelf: Only if this is still the iteration under way: an iterator that was left behind ends some time, and
                must not take the shards of the one that followed it.
        """
        if self._shelf is not None and shelf in (None, self._shelf):
            self._shelf.clear()
            self._shelf = None

    @contextmanager
    def _by_one_thread(self) -> Iterator[None]:
        # One connection serves one thread: a second one would wait for answers that the first has taken.
        if not self._in_use.acquire(blocking=False):
            raise ConfigError("two threads read one data set at once; open a data set, or a loader, for each of them")
        try:
            yield
        finally:
            self._in_use.release()

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
