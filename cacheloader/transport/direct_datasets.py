"""The data sets of a helper process, and the memory that all its sessions share.

Sessions share what is fetched where they name a data set with the same options and the same credentials, as the ranks
and workers of one job do. What another job's rights brought stays apart, although it is the same user's.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheloader.origin.slots import TransferSlots
from cacheloader.protocol import frames
from cacheloader.transport.direct_dataset import DirectDataset
from cacheloader.transport.direct_reader import SHARDS_AHEAD, DirectReader, Shard
from cacheloader.transport.direct_shards import ShardMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.origin.slots import Urgency
    from cacheloader.transport.direct_manifests import ManifestFolder
    from cacheloader.transport.direct_shards import ShardInMemory

_Name = tuple[bytes, str]
"""Digest of a data set's description, options and credentials included, and digest of its manifest."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Opening:
    """A data set that is being resolved for all who ask for it meanwhile."""

    task: asyncio.Task[DirectDataset]
    listeners: list[Callable[[str, int, int], None]] = field(default_factory=list)


class DirectDatasets:
    """All data sets that are open.

    Args:
        manifests: Where manifests are kept.
        memory_bytes: What may be held ready, for all sessions together, beside the shards that are leased.
    """

    def __init__(self, manifests: ManifestFolder, *, memory_bytes: int) -> None:
        self._manifests = manifests
        self._slots = TransferSlots()
        self._memory: ShardMemory[Shard] = ShardMemory(
            _fetch, size_bytes_of=lambda shard: shard[0].size_bytes(shard[1]), budget_bytes=memory_bytes
        )
        self._openings: dict[_Name, _Opening] = {}
        self._open: dict[_Name, DirectDataset] = {}
        self._readers: list[DirectReader] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self, spec: bytes, *, digest: str, progress: Callable[[str, int, int], None]) -> DirectReader:
        """A new session of the data set that ``spec`` describes, resolved once for all who ask at the same time.

        Args:
            spec: An encoded ``DatasetSpec``.
            digest: The manifest expected, "" to resolve the data set as it is now.
            progress: Called with (stage, done, total).

        Raises:
            StateMismatch, OriginError, DatasetError, ConfigError: See ``DirectDataset.open``.
        """
        rights = hashlib.blake2b(spec, digest_size=16).digest()
        dataset = self._open.get((rights, digest)) or await self._resolved((rights, digest), spec, progress)
        kept = self._open.setdefault((rights, dataset.manifest.digest), dataset)
        if kept is not dataset:  # another has opened the same one meanwhile, by its digest
            self._close(dataset)
        reader = DirectReader(kept, self._memory, moved=self._look_ahead)
        self._readers.append(reader)
        return reader

    def close(self, reader: DirectReader) -> None:
        """End a session; a data set that nobody reads any more is forgotten."""
        self._readers.remove(reader)
        reader.close()
        dataset = reader.dataset
        if any(other.dataset is dataset for other in self._readers):
            return
        self._open = {name: other for name, other in self._open.items() if other is not dataset}
        self._memory.drop(lambda shard: shard[0] is dataset)
        self._close(dataset)

    def _close(self, dataset: DirectDataset) -> None:
        task = asyncio.create_task(dataset.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _resolved(self, name: _Name, spec: bytes, progress: Callable[[str, int, int], None]) -> DirectDataset:
        opening = self._openings.get(name)
        if opening is None:
            listeners: list[Callable[[str, int, int], None]] = []

            def tell(stage: str, done: int, total: int) -> None:
                for listener in listeners:
                    listener(stage, done, total)

            work = DirectDataset.open(
                frames.decode_spec(spec), digest=name[1], manifests=self._manifests, slots=self._slots, progress=tell
            )
            opening = _Opening(task=asyncio.create_task(work), listeners=listeners)
            self._openings[name] = opening
        opening.listeners.append(progress)
        try:
            return await asyncio.shield(opening.task)
        finally:
            opening.listeners.remove(progress)
            if not opening.listeners or opening.task.done():
                if self._openings.get(name) is opening:
                    del self._openings[name]
                opening.task.cancel()  # does nothing to one that is done

    def _look_ahead(self) -> None:
        """Fetch ahead for all sessions in turn: first what each needs next, then what each needs after that."""
        soon = dict.fromkeys(
            (reader.dataset, reader.soon[place])
            for place in range(SHARDS_AHEAD)
            for reader in self._readers
            if place < len(reader.soon)
        )
        self._memory.prepare(soon)


async def _fetch(shard: Shard, urgency: Urgency) -> ShardInMemory:
    dataset, number = shard
    return await dataset.fetch(number, urgency)
