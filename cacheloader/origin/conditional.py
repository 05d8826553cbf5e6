"""File systems of fsspec whose stores can be asked with If-Match: S3 through s3fs, and web servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from cacheloader.origin.aws_credentials import AwsChain, AwsKey
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.failure import no_web_listing, reading
from cacheloader.origin.filesystem import FilesystemOrigin, on_loop_of
from cacheloader.origin.fsspec_errors import answer_of
from cacheloader.origin.location import key_of
from cacheloader.origin.options import s3_options
from cacheloader.origin.renewal import Refusal, is_refusal, way_out
from cacheloader.origin.stores import s3_endpoint_and_region, s3_origin_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

    from cacheloader.errors import OriginError
    from cacheloader.keys import ByteRange

_T = TypeVar("_T")


class S3FilesystemOrigin(FilesystemOrigin):
    """One bucket through s3fs.

    Args:
        url: Any URL of the bucket.
        options: `storage_options` as s3fs has them.
        environment: All variables that hold for the job.

    Raises:
        ConfigError: An option is unknown or cannot work.
    """

    def __init__(self, url: str, *, options: Mapping[str, object], environment: Mapping[str, str]) -> None:
        super().__init__(url, options=options)
        self._chosen = s3_options(options)
        self._environment = environment
        self._bucket = urlsplit(url).netloc
        self._chain = AwsChain(environment, profile=self._chosen.profile, uri=url)
        self._asks_chain = not (self._chosen.anonymous or self._chosen.key)
        self._refused: list[Any] = []

    @property
    def origin_id(self) -> str:
        """The same as through the other engine, so that a shard in the cache serves both."""
        return s3_origin_id(self._bucket, self._chosen, self._environment)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Every object below ``prefix``."""
        more: dict[str, str] = {}
        while True:
            page = await self._call_s3("listing", prefix, "list_objects_v2", Prefix=key_of(prefix), **more)
            for found in page.get("Contents", []):
                if not found["Key"].endswith("/"):  # a marker that stands for a directory
                    uri = f"{self._root}{found['Key']}"
                    yield ObjectInfo(uri=uri, size_bytes=found["Size"], version=found.get("ETag", ""))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def stat(self, uri: str) -> ObjectInfo:
        """Size and entity tag of the object ``uri``."""
        head = await self._call_s3("describing", uri, "head_object", Key=key_of(uri))
        return ObjectInfo(uri=uri, size_bytes=head["ContentLength"], version=head.get("ETag", ""))

    async def read_range(self, uri: str, byte_range: ByteRange, *, version: str) -> bytes:
        """Bytes of the object ``uri``, asked for with If-Match."""
        if not byte_range.size_bytes:
            return await super().read_range(uri, byte_range, version=version)
        wanted = {"Range": f"bytes={byte_range.start}-{byte_range.stop - 1}"}
        if version.startswith('"'):
            wanted["IfMatch"] = version

        async def read(filesystem: Any) -> tuple[str, bytes]:
            response = await filesystem._call_s3("get_object", Bucket=self._bucket, Key=key_of(uri), **wanted)
            async with response["Body"] as body:
                return response.get("ETag", ""), await body.read()

        found, body = await self._asked(reading(byte_range), uri, read)
        self.check_found(uri, byte_range, version=version, found=found)
        self.check_length(uri, byte_range, body)
        return body

    async def make_filesystem(self) -> Any:
        """An s3fs that asks once and knows the job's credentials."""
        import s3fs

        config: Any = self._options.get("config_kwargs") or {}
        client: dict[str, Any] = dict(self._options.get("client_kwargs") or {})  # type: ignore[call-overload]
        options = {**self._options, "config_kwargs": {**config, "retries": {"total_max_attempts": 1}}}
        options.pop("profile", None)
        endpoint, region = await s3_endpoint_and_region(self._chosen, self._environment, self._chain)
        if self._asks_chain:
            options |= await self._credentials(await self._chain.key())
        client.pop("endpoint_url", None)
        options["endpoint_url"] = endpoint or None
        options["client_kwargs"] = {**client, "region_name": region or "us-east-1"}
        filesystem = s3fs.S3FileSystem(**options, asynchronous=False, skip_instance_cache=True)
        filesystem.retries = 1
        return filesystem

    async def close_session(self, filesystem: Any) -> None:
        """Close the connections, on the loop that they belong to."""
        refused, self._refused = self._refused, []
        for one in (filesystem, *refused):
            if one._s3 is not None:
                await on_loop_of(one, one._s3.close())

    def told(self, error: Exception, kind: type[OriginError], action: str, uri: str, cause: str) -> Exception:
        """As its parent's; a ``Refusal`` where other credentials may help."""
        status, code = answer_of(error)
        if not is_refusal(status, code):
            return super().told(error, kind, action, uri, cause)
        chain = self._chain if self._asks_chain else None
        return Refusal(self._failure(kind, action, uri, cause, way_out(code, chain)))

    async def _credentials(self, key: AwsKey) -> dict[str, Any]:
        if key.expires is None:
            return {"key": key.key, "secret": key.secret, "token": key.token or None}
        from aiobotocore.credentials import AioRefreshableCredentials  # type: ignore[import-untyped]
        from aiobotocore.session import AioSession  # type: ignore[import-untyped]

        async def renewed() -> dict[str, str]:
            return _metadata(await self._chain.key())

        session = AioSession()
        session._credentials = AioRefreshableCredentials.create_from_metadata(
            metadata=_metadata(key), refresh_using=renewed, method="cacheloader"
        )
        return {"session": session}

    async def _call_s3(self, action: str, uri: str, method: str, **kwargs: object) -> Any:
        async def call(filesystem: Any) -> Any:
            return await filesystem._call_s3(method, Bucket=self._bucket, **kwargs)

        return await self._asked(action, uri, call)

    async def _asked(self, action: str, uri: str, call: Callable[[Any], Coroutine[Any, Any, _T]]) -> _T:
        """The result of ``call``, made again, once, where the store refuses credentials and there are others."""
        filesystem = None
        try:
            with self._errors(action, uri):
                filesystem = await self._filesystem()
                return await on_loop_of(filesystem, call(filesystem))
        except Refusal as refusal:
            if filesystem is None or not await self._renewed(filesystem):
                raise refusal.error from None
        try:
            with self._errors(action, uri):
                filesystem = await self._filesystem()
                return await on_loop_of(filesystem, call(filesystem))
        except Refusal as refusal:
            raise refusal.error from None

    async def _renewed(self, refused: Any) -> bool:
        """Whether there is a file system with other credentials than ``refused`` has."""
        async with self._opening:  # one asks, for all requests that were refused at the same time
            if self._opened is refused:
                if not self._asks_chain or not await self._chain.renew():
                    return False
                self._refused.append(refused)  # others may still read through it
                self._opened = None
            return True


class WebFilesystemOrigin(FilesystemOrigin):
    """One web server through fsspec's HTTP file system. It takes URLs with a query, such as signed ones."""

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Refused: pages of links are no listing."""
        raise no_web_listing(prefix)
        yield

    async def read_range(self, uri: str, byte_range: ByteRange, *, version: str) -> bytes:
        """Bytes of the file ``uri``, asked for with If-Match where it has a strong entity tag."""
        if not version.startswith('"') or not byte_range.size_bytes:
            return await super().read_range(uri, byte_range, version=version)
        with self._errors(reading(byte_range), uri):
            filesystem = await self._filesystem()
            headers = {**filesystem.kwargs.get("headers", {}), "If-Match": version}
            call = filesystem._cat_file(uri, byte_range.start, byte_range.stop, headers=headers)
            body: bytes = await on_loop_of(filesystem, call)
        self.check_length(uri, byte_range, body)
        return body

    async def close_session(self, filesystem: Any) -> None:
        """Close the connections, on the loop that they belong to."""
        session, filesystem._session = filesystem._session, None
        if session is not None:
            await on_loop_of(filesystem, session.close())


def _metadata(key: AwsKey) -> dict[str, str]:
    assert key.expires is not None
    return {
        "access_key": key.key,
        "secret_key": key.secret,
        "token": key.token,
        "expiry_time": key.expires.isoformat(),
    }
