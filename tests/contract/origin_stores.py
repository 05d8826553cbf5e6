"""One store of each kind, filled and asked in the same way by the contract suite."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import fsspec
from cacheloader_daemon.guarded import GuardedOrigin
from cacheloader_daemon.prefixes import UrlPrefixes
from cacheloader_daemon.tenants import Tenant

from cacheloader.origin.mount import MountOrigin
from cacheloader.origin.open import open_origin
from tests.support.seaweedfs import storage_options

if TYPE_CHECKING:
    from pathlib import Path

    from cacheloader.origin.base import Origin
    from tests.support.nginx import NginxServer
    from tests.support.seaweedfs import SeaweedServer


class Store:
    """A directory of a store, at the URL ``root``.

    Attributes:
        can_list: Whether the store can be listed at all.
        knows_directories: Whether listing a directory that does not exist is an error.
    """

    can_list = True
    knows_directories = False
    root = ""

    def put(self, key: str, body: bytes) -> None:
        raise NotImplementedError

    def origin(self) -> Origin:
        raise NotImplementedError

    def denied(self) -> tuple[Origin, str] | None:
        """An origin without rights and a URI to ask it for, ``None`` where there is no such thing."""
        return None

    def missing_store(self) -> tuple[Origin, str] | None:
        """An origin of a bucket that does not exist and a URI in it."""
        return None

    def uri(self, key: str) -> str:
        return f"{self.root}{key}"


class S3Bucket(Store):
    def __init__(self, engine: str, server: SeaweedServer, client: Any, bucket: str, prefix: str) -> None:
        self._engine, self._server, self._client, self._bucket, self._prefix = engine, server, client, bucket, prefix
        self.root = f"s3://{bucket}/{prefix}"

    def put(self, key: str, body: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=body)

    def _open(self, url: str, **options: str) -> Origin:
        url_options = storage_options(self._server.endpoint_url, **options)
        return open_origin(url, storage_options=url_options, engine=self._engine)

    def origin(self) -> Origin:
        return self._open(self.root)

    def denied(self) -> tuple[Origin, str]:
        return self._open(self.root, secret="not-the-secret"), self.uri("denied")

    def missing_store(self) -> tuple[Origin, str]:
        return self._open("s3://no-such-bucket/"), "s3://no-such-bucket/key"


class WebFolder(Store):
    """A folder that nginx serves; ``scheme`` other than http reads it as that store's reads look on the wire."""

    can_list = False

    def __init__(self, engine: str, scheme: str, nginx: NginxServer, prefix: str) -> None:
        self._engine, self._scheme, self._nginx = engine, scheme, nginx
        self._folder = nginx.root / "web" / prefix.rstrip("/")
        self._folder.mkdir(parents=True)
        store = {"http": f"{nginx.url}/web", "gs": "gs://web", "az": "az://web"}[scheme]
        self.root = f"{store}/{prefix}"
        self._options: dict[str, object] = {
            "http": {},
            "gs": {"token": "anon", "endpoint_url": nginx.url},
            "az": {"account_name": "test", "account_host": nginx.url, "anon": True},
        }[scheme]

    def put(self, key: str, body: bytes) -> None:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)

    def origin(self) -> Origin:
        return open_origin(self.root, storage_options=self._options, engine=self._engine)

    def uri(self, key: str) -> str:
        # A web URL is percent-encoded by whoever writes it.
        encoded = key.replace("%", "%25").replace("?", "%3F").replace("#", "%23").replace(" ", "%20")
        return f"{self.root}{encoded if self._scheme == 'http' else key}"

    def denied(self) -> tuple[Origin, str]:
        if self._scheme != "http":
            uri = f"{self._scheme}://denied/x"
            return open_origin(uri, storage_options=self._options), uri
        return self.origin(), f"{self._nginx.url}/denied/x"


class Folder(Store):
    knows_directories = True

    def __init__(self, engine: str, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self.root = f"file://{folder}/"

    def put(self, key: str, body: bytes) -> None:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)

    def origin(self) -> Origin:
        return open_origin(self.root, engine=self._engine)


class GuardedFolder(Folder):
    """As a tenant of a shared daemon may read it."""

    def __init__(self, folder: Path) -> None:
        super().__init__("mount", folder)

    def origin(self) -> Origin:
        tenant = Tenant(name="tenant", prefixes=UrlPrefixes(allow=(self.root,)))
        return GuardedOrigin(MountOrigin(within=tenant.prefixes.folders), tenant=tenant, uid=1)


class Memory(Store):
    """fsspec's file system in memory: the universal adapter without any server."""

    knows_directories = True
    _numbers = itertools.count()

    def __init__(self) -> None:
        self.root = f"memory://contract-{next(self._numbers)}/"

    def put(self, key: str, body: bytes) -> None:
        fsspec.filesystem("memory").pipe_file(self.uri(key), body)

    def origin(self) -> Origin:
        return open_origin(self.root)
