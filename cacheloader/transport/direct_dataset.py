"""A data set as a helper process reads it: resolved, and its shards brought into memory from the origin."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from cacheloader import fdpass
from cacheloader.errors import CorruptShard, ProtocolError, StateMismatch
from cacheloader.formats import registry
from cacheloader.formats.source import FileSource
from cacheloader.manifest.resolve import format_of, resolve
from cacheloader.manifest.scan import ScanCounter
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.location import canonical_url
from cacheloader.origin.open import open_origin
from cacheloader.origin.threads import run_to_its_end
from cacheloader.origin.transfer import TransferLimits, transfer
from cacheloader.transport.direct_shards import ShardInMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheloader.manifest.record import Manifest
    from cacheloader.origin.base import Bytes, Origin
    from cacheloader.origin.slots import TransferSlots, Urgency
    from cacheloader.protocol.messages import DatasetSpec
    from cacheloader.transport.direct_manifests import ManifestFolder


class DirectDataset:
    """One data set, for all sessions of a helper process that name it with the same options and credentials.

    Args:
        manifest: Its shards.
        origin: Where they lie.
        slots: The budget of requests that all data sets of the process share.
    """

    def __init__(self, manifest: Manifest, origin: Origin, *, slots: TransferSlots) -> None:
        self.manifest = manifest
        self._origin = origin
        self._format = registry.named(manifest.format)
        self._slots = slots
        self._limits = TransferLimits()

    @classmethod
    async def open(
        cls,
        spec: DatasetSpec,
        *,
        digest: str,
        manifests: ManifestFolder,
        slots: TransferSlots,
        progress: Callable[[str, int, int], None],
    ) -> DirectDataset:
        """Resolve ``spec``, unless the manifest called ``digest`` is already known.

        Raises:
            StateMismatch: ``digest`` is given, its manifest is not known, and the data set has another one now.
            OriginError, DatasetError, ConfigError: The data set cannot be resolved.
        """
        if not spec.urls:
            raise ProtocolError("a data set needs a URL")
        origin = open_origin(
            canonical_url(spec.urls[0]), storage_options=spec.storage_options, environment=spec.environment
        )
        manifest = manifests.load(digest) if digest else None
        # The same names in another store are other shards, as far as anybody knows.
        if manifest is None or manifest.origin_id != origin.origin_id:
            manifest = await resolve(spec, origin, _Scan(origin, spec.format), progress=progress)
        if digest not in ("", manifest.digest):
            raise StateMismatch(
                f"the data set {spec.urls[0]} now has the manifest {manifest.digest}, and {digest} was expected: "
                "shards were added, removed or changed since"
            )
        await asyncio.to_thread(manifests.save, manifest)
        return cls(manifest, origin, slots=slots)

    def size_bytes(self, shard: int) -> int:
        """Length of shard number ``shard``."""
        return int(self.manifest.size_bytes[shard])

    async def aclose(self) -> None:
        """Close the connections to the store."""
        await self._origin.aclose()

    async def fetch(self, shard: int, urgency: Urgency) -> ShardInMemory:
        """Bring shard number ``shard`` into memory.

        Raises:
            OriginError, DatasetError: It cannot be had.
        """
        info = ObjectInfo(
            uri=self.manifest.uri(shard),
            size_bytes=int(self.manifest.size_bytes[shard]),
            version=self.manifest.version(shard),
        )
        data_fd = os.memfd_create("cacheloader-shard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:

            async def write_at(offset: int, body: Bytes) -> None:
                await run_to_its_end(None, lambda: fdpass.write_whole(data_fd, body, offset=offset))

            await transfer(self._origin, info, write_at, limits=self._limits, slots=self._slots, urgency=urgency)
            fdpass.seal(data_fd)
            index = await run_to_its_end(None, lambda: self._index(data_fd, info))
            index_fd = fdpass.sealed_memory_file("cacheloader-index", index)
        except BaseException:
            os.close(data_fd)
            raise
        return ShardInMemory(data_fd=data_fd, index_fd=index_fd, size_bytes=info.size_bytes, index_bytes=len(index))

    def _index(self, data_fd: int, info: ObjectInfo) -> bytes:
        try:
            return self._format.build_index(FileSource(data_fd, size_bytes=info.size_bytes), uri=info.uri)
        except OSError as error:
            raise CorruptShard(f"shard {info.uri} cannot be indexed: {error}", uri=info.uri) from error


class _Scan:
    """Counts the shards of a data set whose format is known once they are seen."""

    def __init__(self, origin: Origin, format_name: str) -> None:
        self._origin = origin
        self._format_name = format_name

    async def count(self, shards: Sequence[ObjectInfo], *, progress: Callable[[int, int], None]) -> list[int]:
        """Samples of each shard, in order (see ``manifest.resolve.SampleCounter``)."""
        shard_format = format_of(self._format_name, (info.uri for info in shards))
        return await ScanCounter(self._origin, shard_format).count(shards, progress=progress)
