"""Any file system of fsspec, through our own ranged reader.

fsspec's own `get_file` and `cat_ranges` check neither lengths nor versions and hide retries. Asynchronous file systems
run on fsspec's own loop and thread, whatever loop the caller has: they keep sessions that belong to one loop, and some
start tasks when they are collected. Others run in a bounded pool of threads, an instance for each.

Where the store has no conditional read, the version is compared before and after each range, so bytes of a version that
came and went in between could be missed; `s3`, `http` and `https` ask with If-Match instead.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from cacheloader.errors import (
    CacheloaderError,
    ConfigError,
    OriginChanged,
    OriginError,
    OriginNotFound,
    OriginShortBody,
)
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.failure import failure, masked, reading, secret_values
from cacheloader.origin.filesystem_threads import FilesystemThreads
from cacheloader.origin.fsspec_errors import described
from cacheloader.origin.location import scheme_of, store_url
from cacheloader.origin.options import PUBLIC_NAMES
from cacheloader.origin.wrapping import refuse_wrapping, refuse_wrapping_class

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping

    from cacheloader.keys import ByteRange

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")
_DEFAULT_THREADS = 16
# Where file systems put what changes with an object, the most exact first.
_VERSION_NAMES = (
    "ETag", "etag", "generation", "blob_id", "sha", "mtime", "LastModified", "Last-Modified", "last_modified",
    "modified", "modify", "updated", "created",
)  # fmt: skip


class FilesystemOrigin:
    """One store behind a file system of fsspec.

    Args:
        url: Any URL of the store.
        options: `storage_options`, passed to the file system as they are.

    Raises:
        ConfigError: fsspec does not know the protocol, or it reads through another one or from local files.
    """

    def __init__(self, url: str, *, options: Mapping[str, object]) -> None:
        self._url = url
        self._protocol = scheme_of(url)
        self._root = store_url(url)
        self._options = dict(options)
        refuse_wrapping(self._root, protocol=self._protocol, options=self._options)
        self._secrets = secret_values(self._options, public=PUBLIC_NAMES)
        name = f"fsspec-{self._protocol}"
        self._threads = FilesystemThreads(self._make, max_threads=_DEFAULT_THREADS, name=name)
        self._opening = asyncio.Lock()
        self._opened: Any = None
        if self._protocol not in fsspec.available_protocols():
            known = ", ".join(sorted(fsspec.available_protocols()))
            raise ConfigError(f"{url} has the unknown protocol {self._protocol}; the known ones are {known}")

    @property
    def origin_id(self) -> str:
        """Protocol, endpoint and host, without user and password."""
        host = urlsplit(self._root).netloc.rpartition("@")[2]
        return f"{self._protocol}+{self._options.get('endpoint_url') or 'fsspec'}/{host}"

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Every file below the directory ``prefix``."""
        with self._errors("listing", prefix):
            filesystem = await self._filesystem()
            directory = filesystem._strip_protocol(prefix).rstrip("/")
            found = await self._fresh(filesystem, "find", directory, detail=True)
            if not found and not await self._fresh(filesystem, "exists", directory):
                raise self._failure(OriginNotFound, "listing", prefix, "there is no such directory")
        for name, info in found.items():
            uri = f"{prefix.rstrip('/')}/{name.removeprefix(directory).lstrip('/')}"
            with self._errors("listing", uri):
                if info.get("size") is None:
                    raise self._failure(OriginError, "listing", uri, "the store does not say its size")
                described = _object_info(uri, info)
            yield described

    async def stat(self, uri: str) -> ObjectInfo:
        """Size and version of the file ``uri``."""
        with self._errors("describing", uri):
            filesystem = await self._filesystem()
            info = await self._fresh(filesystem, "info", filesystem._strip_protocol(uri))
            if info.get("type") == "directory" or info.get("size") is None:
                cause = "it is a directory" if info.get("type") == "directory" else "the store does not say its size"
                raise self._failure(OriginNotFound, "describing", uri, cause)
            return _object_info(uri, info)

    async def read_range(self, uri: str, byte_range: ByteRange, *, version: str) -> bytes:
        """Bytes of the file ``uri`` under ``version``."""
        if version or not byte_range.size_bytes:
            await self._check_version(uri, byte_range, version)
        if not byte_range.size_bytes:
            return b""
        with self._errors(reading(byte_range), uri):
            filesystem = await self._filesystem()
            path = filesystem._strip_protocol(uri)
            body: bytes
            if _is_asynchronous(filesystem):
                body = await on_loop_of(filesystem, filesystem._cat_file(path, byte_range.start, byte_range.stop))
            else:
                body = await self._threads.ask(lambda filesystem: _read_blocking(filesystem, path, byte_range))
        self.check_length(uri, byte_range, body)
        if version:
            await self._check_version(uri, byte_range, version)
        return body

    async def aclose(self) -> None:
        """Close the file system's session where it has one; calling it again does nothing."""
        filesystem, self._opened = self._opened, None
        if filesystem is not None:
            await self.close_session(filesystem)
        self._threads.close()

    async def make_filesystem(self) -> Any:
        """A new file system, or the one of a thread: each knows its kind."""
        return await self._threads.ask(lambda filesystem: filesystem)

    async def close_session(self, filesystem: Any) -> None:
        """Free what ``filesystem`` holds. Most hold nothing that their collection does not free."""

    def check_length(self, uri: str, byte_range: ByteRange, body: bytes) -> None:
        """Raise ``OriginShortBody`` unless ``body`` is as long as ``byte_range``."""
        if len(body) != byte_range.size_bytes:
            raise self._failure(OriginShortBody, reading(byte_range), uri, f"{len(body)} bytes came back")

    def check_found(self, uri: str, byte_range: ByteRange, *, version: str, found: str) -> None:
        """Raise ``OriginChanged`` if ``found`` is not ``version`` ("" means any)."""
        if version and found != version:
            cause = f"the object is now version {found or '(none)'} and the manifest names {version}"
            raise self._failure(OriginChanged, reading(byte_range), uri, cause)

    async def _check_version(self, uri: str, byte_range: ByteRange, version: str) -> None:
        self.check_found(uri, byte_range, version=version, found=(await self.stat(uri)).version)

    async def _filesystem(self) -> Any:
        async with self._opening:
            if self._opened is None:
                self._opened = await self.make_filesystem()
            return self._opened

    async def _fresh(self, filesystem: Any, method: str, *args: object, **kwargs: object) -> Any:
        """The answer of the store itself, not of what a file system remembers."""
        if _is_asynchronous(filesystem):
            filesystem.invalidate_cache()
            return await on_loop_of(filesystem, getattr(filesystem, f"_{method}")(*args, **kwargs))

        def ask(filesystem: Any) -> Any:
            filesystem.invalidate_cache()
            return getattr(filesystem, method)(*args, **kwargs)

        return await self._threads.ask(ask)

    def _make(self) -> Any:
        """A new file system, shared with nobody: fsspec would else hand out one made with other credentials."""
        try:
            kind = fsspec.get_filesystem_class(self._protocol)
            refuse_wrapping_class(self._root, protocol=self._protocol, kind=kind)
            options = {**kind._get_kwargs_from_urls(self._url), **self._options}
            return kind(**options, skip_instance_cache=True)
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"{self._root} needs a package that is not installed: {error}") from error
        except (TypeError, ValueError) as error:
            text = masked(f"the storage options for {self._root} cannot work: {error}", self._secrets)
            raise ConfigError(text) from None

    def _failure(self, kind: type[OriginError], action: str, uri: str, cause: str, way_out: str = "") -> OriginError:
        return failure(kind, action=action, uri=uri, cause=cause, way_out=way_out, secrets=self._secrets)

    @contextmanager
    def _errors(self, action: str, uri: str) -> Iterator[None]:
        """Every exception of a file system as one of ours. They are too many to name: each protocol has its own."""
        try:
            yield
        except CacheloaderError:
            raise
        except Exception as error:  # noqa: BLE001 - always raised again, as one of ours
            kind, cause = described(error)
            _LOGGER.debug("%s: %s", type(error).__name__, masked(str(error), self._secrets))
            raise self.told(error, kind, action, uri, cause) from None

    def told(self, error: Exception, kind: type[OriginError], action: str, uri: str, cause: str) -> Exception:
        """What is raised for ``error``, which means ``kind``."""
        del error
        return self._failure(kind, action, uri, cause)


async def on_loop_of(filesystem: Any, call: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``call``, run on fsspec's own loop; cancelling here cancels it there."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, filesystem.loop))


def _is_asynchronous(filesystem: Any) -> bool:
    return isinstance(filesystem, AsyncFileSystem) and bool(filesystem.async_impl)


def _read_blocking(filesystem: Any, path: str, byte_range: ByteRange) -> bytes:
    if isinstance(
        filesystem, MemoryFileSystem
    ):  # all who open one of its files get the same object, and one place in it
        return bytes(filesystem.cat_file(path, byte_range.start, byte_range.stop))
    # Without a cache of the file object's own: it would read ahead what nobody asked for.
    with filesystem.open(path, "rb", cache_type="none") as file:
        file.seek(byte_range.start)
        parts, left = [], byte_range.size_bytes
        while left and (part := file.read(left)):
            parts.append(part)
            left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _object_info(uri: str, info: Mapping[str, Any]) -> ObjectInfo:
    size_bytes = int(info["size"])
    name = next((name for name in _VERSION_NAMES if info.get(name)), "")
    value = info[name] if name else ""
    # Some tell a time as a number in one method and as a date in another.
    text = str(value.timestamp() if isinstance(value, datetime) else value)
    # A time alone is a weak mark: an overwrite within its resolution keeps it, but seldom the size too.
    exact = not name or name in {"ETag", "etag", "generation", "blob_id", "sha"}
    return ObjectInfo(uri=uri, size_bytes=size_bytes, version=text if exact else f"{text}-{size_bytes}")
