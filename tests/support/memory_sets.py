"""Data sets whose shards lie in memory, read by ``RemoteDataset`` without a daemon: for tests of order and position."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import cacheloader.source
from cacheloader.errors import StateMismatch
from cacheloader.formats.webdataset import WebDatasetFormat
from cacheloader.protocol.messages import DatasetSpec
from tests.support.memory_transport import MemoryTransport
from tests.support.tars import packed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheloader.config import TransportOptions
    from cacheloader.manifest.record import Manifest
    from cacheloader.transport.base import AccessPlan, Lease


class MemorySets:
    """Data sets by URL; all sessions of a process share their shards."""

    def __init__(self) -> None:
        self._sets: dict[str, tuple[MemoryTransport, Manifest]] = {}

    def add(self, url: str, samples_per_shard: Sequence[int]) -> list[str]:
        """Make the data set ``url`` (ends in ``/``), each sample with a key and one field; returns the keys."""
        shards, keys = {}, []
        for shard, count in enumerate(samples_per_shard):
            names = [f"{shard:03d}-{sample:03d}" for sample in range(count)]
            keys += names
            shards[f"{url}{shard:03d}.tar"] = packed([(f"{name}.txt", name.encode()) for name in names])
        transport = MemoryTransport(shards, shard_format=WebDatasetFormat())
        self._sets[url] = (transport, transport.open_dataset(DatasetSpec(urls=[url])))
        return keys

    def remove(self, url: str) -> None:
        self._sets.pop(url)[0].close()

    def find(self, spec: DatasetSpec) -> tuple[MemoryTransport, Manifest]:
        (url,) = spec.urls
        return self._sets[url]

    def _session(self, options: TransportOptions) -> _Session:
        return _Session(self)

    @contextmanager
    def installed(self) -> Iterator[MemorySets]:
        """Let every data set that is opened meanwhile, here and in forked workers, find its shards here."""
        with mock.patch.object(cacheloader.source, "open_transport", self._session):
            yield self
        for url in list(self._sets):
            self.remove(url)


class _Session:
    def __init__(self, sets: MemorySets) -> None:
        self._sets = sets

    def open_dataset(self, spec: DatasetSpec, *, digest: str = "", progress: Any = None) -> Manifest:
        self._transport, manifest = self._sets.find(spec)
        if digest not in ("", manifest.digest):
            raise StateMismatch(f"{spec.urls} has the manifest {manifest.digest}, {digest} was expected")
        return manifest

    def follow(self, plan: AccessPlan) -> None:
        pass

    def advance(self, clock: int) -> None:
        pass

    def acquire(self, shard: int) -> Lease:
        return self._transport.acquire(shard)

    def close(self) -> None:
        pass
