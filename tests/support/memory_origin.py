"""A store in memory: the whole contract of an origin, failures on order, and a count of every question."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from typing import TYPE_CHECKING

from cacheloader.errors import OriginChanged, OriginError, OriginNotFound, OriginShortBody
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.failure import failure, reading

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from cacheloader.keys import ByteRange


class MemoryOrigin:
    """Objects by URI.

    Args:
        objects: Their contents.
        store: Root that exists even when it is empty.

    Attributes:
        objects: May be changed at any time; a changed object has another version.
        asked: How often each (verb, URI) was asked.
        most_in_flight: The largest number of questions open at one time.
    """

    def __init__(self, objects: dict[str, bytes], *, store: str = "mem://bucket/") -> None:
        self.objects = dict(objects)
        self.asked: Counter[tuple[str, str]] = Counter()
        self.most_in_flight = 0
        self._store = store
        self._in_flight = 0
        self._failures: list[tuple[Callable[[str, str], bool], OriginError, int]] = []
        self._closed = False

    @property
    def origin_id(self) -> str:
        return self._store.rstrip("/")

    def fail(self, error: OriginError, *, verb: str = "", uri: str = "", times: int = 1) -> None:
        """Answer the next ``times`` matching questions with ``error``."""
        self._failures.append((lambda v, u: verb in {"", v} and uri in {"", u}, error, times))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        assert prefix.endswith("/")
        await self._question("list", prefix)
        found = [uri for uri in reversed(self.objects) if uri.startswith(prefix)]
        if not found and not prefix.startswith(self._store):
            raise failure(OriginNotFound, action="listing", uri=prefix, cause="no such bucket")
        for uri in found:
            yield self._info(uri)

    async def stat(self, uri: str) -> ObjectInfo:
        await self._question("stat", uri)
        return self._info(uri)

    async def read_range(self, uri: str, byte_range: ByteRange, *, version: str) -> bytes:
        await self._question("read", uri)
        action = reading(byte_range)
        info = self._info(uri, action)
        if version not in {"", info.version}:
            raise failure(OriginChanged, action=action, uri=uri, cause=f"it is {info.version} and was {version}")
        block = self.objects[uri][byte_range.start : byte_range.stop]
        if len(block) != byte_range.size_bytes:
            raise failure(OriginShortBody, action=action, uri=uri, cause=f"{len(block)} bytes came")
        return block

    async def aclose(self) -> None:
        self._closed = True

    def _info(self, uri: str, action: str = "describing") -> ObjectInfo:
        if uri not in self.objects:
            raise failure(OriginNotFound, action=action, uri=uri, cause="no such key")
        content = self.objects[uri]
        return ObjectInfo(uri=uri, size_bytes=len(content), version=f"v{zlib.crc32(content):08x}")

    async def _question(self, verb: str, uri: str) -> None:
        assert not self._closed, "asked after aclose"
        self.asked[verb, uri] += 1
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            await asyncio.sleep(0)
            for number, (matches, error, times) in enumerate(self._failures):
                if matches(verb, uri):
                    self._failures[number : number + 1] = [(matches, error, times - 1)] if times > 1 else []
                    raise error
        finally:
            self._in_flight -= 1
