"""Shards that lie in memory: for tests that need neither a daemon nor a store."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING
from weakref import WeakSet

from cacheloader import fdpass
from cacheloader.errors import ConfigError, OriginNotFound, StateMismatch
from cacheloader.manifest.record import Manifest, ShardInfo
from cacheloader.transport.lease import FileLease

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cacheloader.formats.base import ShardFormat
    from cacheloader.protocol.messages import DatasetSpec
    from cacheloader.transport.base import AccessPlan


class MemoryTransport:
    """A ``Transport`` over shards given as bytes.

    Args:
        shards: URI to content. A data set is named by such URIs, or by a prefix that ends in ``/``.
        shard_format: Their format.
    """

    def __init__(self, shards: Mapping[str, bytes], *, shard_format: ShardFormat) -> None:
        self._shards = dict(shards)
        self._format = shard_format
        self._files: dict[str, tuple[int, bytes]] = {}
        self._manifest: Manifest | None = None
        self._leases: WeakSet[FileLease] = WeakSet()
        self._is_closed = False

    def open_dataset(
        self,
        spec: DatasetSpec,
        *,
        digest: str = "",
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Manifest:
        """See ``Transport.open_dataset``."""
        self._enter()
        uris = [uri for url in spec.urls for uri in self._matching(url)]
        if not uris:
            raise ConfigError("urls is empty; name at least one shard")
        infos: list[ShardInfo] = []
        for done, uri in enumerate(uris, start=1):
            content = self._shards[uri]
            _, index = self._file(uri)
            version = hashlib.blake2b(content, digest_size=8).hexdigest()
            num_samples = int.from_bytes(index[:8], "little")
            infos.append(ShardInfo(uri=uri, size_bytes=len(content), version=version, num_samples=num_samples))
            if progress is not None:
                progress("counting samples", done, len(uris))
        manifest = Manifest.build(infos, format=self._format.name, origin_id="memory")
        if digest not in ("", manifest.digest):
            raise StateMismatch(f"the shards in memory have the manifest {manifest.digest}, {digest} was expected")
        self._manifest = manifest
        return manifest

    def follow(self, plan: AccessPlan) -> None:
        """See ``Transport.follow``; everything is there already."""
        self._enter()

    def advance(self, clock: int) -> None:
        """See ``Transport.advance``."""
        self._enter()

    def acquire(self, shard: int) -> FileLease:
        """See ``Transport.acquire``."""
        self._enter()
        if self._manifest is None:
            raise ConfigError("this session has no data set yet; call open_dataset first")
        uri = self._manifest.uri(shard)
        fd, index = self._file(uri)
        lease = FileLease(fd=os.dup(fd), size_bytes=len(self._shards[uri]), index=index, source="memory", uri=uri)
        self._leases.add(lease)
        return lease

    def close(self) -> None:
        """See ``Transport.close``."""
        self._is_closed = True
        for lease in list(self._leases):
            lease.release()
        self._close_files()

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self._close_files()

    def _enter(self) -> None:
        if self._is_closed:
            raise ConfigError("this session is closed; open another")

    def _matching(self, url: str) -> list[str]:
        uris = sorted(uri for uri in self._shards if uri == url or (url.endswith("/") and uri.startswith(url)))
        if not uris:
            raise OriginNotFound(f"there is no shard {url} among the {len(self._shards)} in memory", uri=url)
        return uris

    def _file(self, uri: str) -> tuple[int, bytes]:
        if uri not in self._files:
            content = self._shards[uri]
            fd = fdpass.sealed_memory_file("cacheloader-shard", content)
            try:
                source = FileLease(fd=os.dup(fd), size_bytes=len(content), index=b"", source="memory", uri=uri)
                self._files[uri] = (fd, self._format.build_index(source, uri=uri))
            except BaseException:
                os.close(fd)
                raise
        return self._files[uri]

    def _close_files(self) -> None:
        while self._files:
            _, (fd, _) = self._files.popitem()
            os.close(fd)
