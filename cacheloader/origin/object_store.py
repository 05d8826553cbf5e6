"""Object stores and web servers through obstore: Rust does the transfer, without the interpreter lock.

Keys with an empty segment (``a//b``) cannot be read: obstore refuses them, and lists them as ``a/b``. The engine
``fsspec`` reads them.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import obstore

from cacheloader.errors import (
    CacheloaderError,
    OriginChanged,
    OriginError,
    OriginShortBody,
    OriginTimeout,
    OriginUnavailable,
)
from cacheloader.origin import renewal
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.drain import drain, drain_at_exit
from cacheloader.origin.failure import failure, masked, no_web_listing, reading, secret_values
from cacheloader.origin.location import key_of, scheme_of, store_url
from cacheloader.origin.obstore_errors import FOREIGN, answer_of, described
from cacheloader.origin.options import PUBLIC_NAMES
from cacheloader.origin.renewal import Refusal, is_refusal
from cacheloader.origin.stores import azure_store, gs_store, http_store, s3_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore

    from cacheloader.keys import ByteRange
    from cacheloader.origin.base import Bytes

_T = TypeVar("_T")

_LOGGER = logging.getLogger(__name__)

BUILDERS = {
    "s3": s3_store,
    "gs": gs_store,
    "az": azure_store,
    "abfs": azure_store,
    "http": http_store,
    "https": http_store,
}
_CLOSING_DEADLINE_S = 5.0


class ObjectStoreOrigin:
    """One bucket, container or web server.

    Args:
        url: Any URL of the store.
        options: `storage_options`, named as s3fs, gcsfs, adlfs or fsspec's HTTP file system name them.
        environment: All variables that hold for the job (see ``effective_environment``).

    Raises:
        ConfigError: An option is unknown or cannot work.
    """

    def __init__(self, url: str, *, options: Mapping[str, object], environment: Mapping[str, str]) -> None:
        self._scheme = scheme_of(url)
        self._root = store_url(url)
        self._origin_id, self._build, self._chain = BUILDERS[self._scheme](url, options, environment)
        self._secrets = secret_values(dict(options), public=PUBLIC_NAMES)
        self._opened: ObjectStore | None = None
        self._opening = asyncio.Lock()
        self._num_calls = 0
        self._no_calls = asyncio.Event()
        self._no_calls.set()
        drain_at_exit()

    @property
    def origin_id(self) -> str:
        """Endpoint and bucket."""
        return str(self._origin_id)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Every object below ``prefix``. A web server cannot be listed."""
        if self._scheme in {"http", "https"}:
            raise no_web_listing(prefix)
        path = self._path(prefix, action="listing") or None

        async def first(store: ObjectStore) -> tuple[AsyncIterator[Any], Any]:
            batches = aiter(obstore.list(store, prefix=path))
            return batches, await anext(batches, None)

        batches, batch = await self._asked("listing", prefix, first)
        while batch is not None:
            for meta in batch:
                uri = f"{self._root}{meta['path']}"
                if uri.startswith(prefix):  # not so the marker object of the directory itself
                    yield _info(uri, meta)
            try:
                with self._call("listing", prefix):
                    batch = await anext(batches, None)
            except Refusal as refusal:
                raise refusal.error from None

    async def stat(self, uri: str) -> ObjectInfo:
        """Size and entity tag of the object ``uri``."""
        path = self._path(uri, action="describing")
        return _info(uri, await self._asked("describing", uri, lambda store: obstore.head_async(store, path)))

    async def read_range(self, uri: str, byte_range: ByteRange, *, version: str) -> Bytes:
        """Bytes of the object ``uri``. The store is asked with If-Match, and what it says it sent is checked too."""
        action = reading(byte_range)
        if not byte_range.size_bytes:
            self._check_version(version, (await self.stat(uri)).version, action, uri)
            return b""
        options: GetOptions = {"range": (byte_range.start, byte_range.stop)}
        if version.startswith('"'):  # a weak tag, W/"…", or a date never matches
            options["if_match"] = version
        path = self._path(uri, action=action)

        async def read(store: ObjectStore) -> obstore.Bytes:
            result = await obstore.get_async(store, path, options=options)
            self._check_version(version, _version(result.meta), action, uri)
            return await result.bytes_async()

        body = await self._asked(action, uri, read)
        if len(body) != byte_range.size_bytes:
            raise self._failure(OriginShortBody, action, uri, f"{len(body)} bytes came back")
        return body

    async def aclose(self) -> None:
        """Wait until obstore's threads are done with this process; calling it again does nothing."""
        try:
            async with asyncio.timeout(_CLOSING_DEADLINE_S):
                await self._no_calls.wait()
        except TimeoutError:
            pass
        if self._opened is not None:
            self._opened = None
            await drain()

    async def _store(self) -> ObjectStore:
        async with self._opening:
            if self._opened is None:
                self._opened = await self._build()
            return self._opened

    async def _asked(self, action: str, uri: str, call: Callable[[ObjectStore], Awaitable[_T]]) -> _T:
        """The result of ``call``, made again, once, where the store refuses credentials and there are others."""
        store: ObjectStore | None = None
        try:
            with self._call(action, uri):
                store = await self._store()
                return await call(store)
        except Refusal as refusal:
            if store is None or not await self._renewed(store):
                raise refusal.error from None
        try:
            with self._call(action, uri):
                return await call(await self._store())
        except Refusal as refusal:
            raise refusal.error from None

    async def _renewed(self, refused: ObjectStore) -> bool:
        """Whether there is a store with other credentials than ``refused`` has."""
        async with self._opening:  # one asks, for all requests that were refused at the same time
            if self._opened is refused and (self._chain is None or not await self._chain.renew()):
                return False
            if self._opened is refused:
                self._opened = None  # it would keep what it was told
            return True

    def _path(self, uri: str, *, action: str) -> str:
        if not uri.startswith(self._root):
            raise self._failure(OriginError, action, uri, f"it lies outside of {self._root}")
        key = key_of(uri)
        if self._scheme in {"http", "https"} and "?" in key:
            way_out = 'pass storage_options={"engine": "fsspec"}'
            raise self._failure(OriginError, action, uri, "the engine obstore reads no URLs with a query", way_out)
        # A URL of a web server is percent-encoded already; obstore encodes what it is given.
        key = unquote(key) if self._scheme in {"http", "https"} else key
        if action != "listing" and (key.startswith("/") or key.endswith("/") or "//" in key):
            way_out = 'rename the object, or pass storage_options={"engine": "fsspec"}'
            raise self._failure(OriginError, action, uri, "the key has an empty segment", way_out)
        return key

    def _check_version(self, version: str, found: str, action: str, uri: str) -> None:
        if version and found != version:
            cause = f"the object is now version {found or '(none)'} and the manifest names {version}"
            raise self._failure(OriginChanged, action, uri, cause)

    def _failure(self, kind: type[OriginError], action: str, uri: str, cause: str, way_out: str = "") -> OriginError:
        return failure(kind, action=action, uri=uri, cause=cause, way_out=way_out, secrets=self._secrets)

    @contextmanager
    def _call(self, action: str, uri: str) -> Iterator[None]:
        """Count the call while it runs, and turn every exception of obstore into one of ours, or a ``Refusal``."""
        self._num_calls += 1
        self._no_calls.clear()
        try:
            yield
        except CacheloaderError:
            raise
        except FOREIGN as error:
            _LOGGER.debug("obstore: %s", masked(str(error), self._secrets))
            kind, cause, way_out = described(error)
            status, code = answer_of(error)
            if is_refusal(status, code):
                way_out = renewal.way_out(code, self._chain) or way_out
                raise Refusal(self._failure(kind, action, uri, cause, way_out)) from None
            if kind in (OriginUnavailable, OriginTimeout) and self.origin_id not in cause:
                cause = f"{cause}, asking {self.origin_id}"
            raise self._failure(kind, action, uri, cause, way_out) from None
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._no_calls.set()


def _info(uri: str, meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(uri=uri, size_bytes=meta["size"], version=_version(meta))


def _version(meta: Any) -> str:
    """The entity tag with its quotes, as If-Match wants it, else the time of change and the size."""
    if meta["e_tag"]:
        return str(meta["e_tag"])
    return f"{meta['last_modified'].isoformat()}-{meta['size']}"
