"""File systems of fsspec whose stores can be asked with If-Match: S3 through s3fs, and web servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cacheloader.origin.aws_credentials import AwsChain, AwsKey
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.failure import no_web_listing, reading
from cacheloader.origin.filesystem import FilesystemOrigin, on_loop_of
from cacheloader.origin.location import key_of
from cacheloader.origin.options import s3_options
from cacheloader.origin.stores import s3_endpoint_and_region, s3_origin_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from cacheloader.keys import ByteRange


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

    @property
    def origin_id(self) -> str:
        """The same as through the other engine, so that a shard in the cache serves both."""
        return s3_origin_id(self._bucket, self._chosen, self._environment)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Every object below ``prefix``."""
        more: dict[str, str] = {}
        while True:
            with self._errors("listing", prefix):
                page = await self._call_s3("list_objects_v2", Prefix=key_of(prefix), **more)
            for found in page.get("Contents", []):
                if not found["Key"].endswith("/"):  # a marker that stands for a directory
                    uri = f"{self._root}{found['Key']}"
                    yield ObjectInfo(uri=uri, size_bytes=found["Size"], version=found.get("ETag", ""))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def stat(self, uri: str) -> ObjectInfo:
        """Size and entity tag of the object ``uri``."""
        with self._errors("describing", uri):
            head = await self._call_s3("head_object", Key=key_of(uri))
        return ObjectInfo(uri=uri, size_bytes=head["ContentLength"], version=head.get("ETag", ""))

    async def read_range(self, uri: str, byte_range: ByteRange, *, version: str) -> bytes:
        """Bytes of the object ``uri``, asked for with If-Match."""
        if not byte_range.size_bytes:
            return await super().read_range(uri, byte_range, version=version)
        wanted = {"Range": f"bytes={byte_range.start}-{byte_range.stop - 1}"}
        if version.startswith('"'):
            wanted["IfMatch"] = version
        with self._errors(reading(byte_range), uri):
            filesystem = await self._filesystem()

            async def read() -> tuple[str, bytes]:
                response = await filesystem._call_s3("get_object", Bucket=self._bucket, Key=key_of(uri), **wanted)
                async with response["Body"] as body:
                    return response.get("ETag", ""), await body.read()

            found, body = await on_loop_of(filesystem, read())
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
        if not (self._chosen.anonymous or self._chosen.key):
            options |= await self._credentials(await self._chain.key())
        client.pop("endpoint_url", None)
        options["endpoint_url"] = endpoint or None
        options["client_kwargs"] = {**client, "region_name": region or "us-east-1"}
        filesystem = s3fs.S3FileSystem(**options, asynchronous=False, skip_instance_cache=True)
        filesystem.retries = 1
        return filesystem

    async def close_session(self, filesystem: Any) -> None:
        """Close the connections, on the loop that they belong to."""
        if filesystem._s3 is not None:
            await on_loop_of(filesystem, filesystem._s3.close())

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

    async def _call_s3(self, method: str, **kwargs: object) -> Any:
        filesystem = await self._filesystem()
        return await on_loop_of(filesystem, filesystem._call_s3(method, Bucket=self._bucket, **kwargs))


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
