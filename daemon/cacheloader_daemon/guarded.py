"""An origin as one tenant may use it: every question that names a URL is compared with his prefixes first.

Whatever leads to a store (patterns, listings, files beside the shards, single shards) passes here.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, cast

from cacheloader.errors import ConfigError, OriginDenied

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from cacheloader.keys import ByteRange
    from cacheloader.origin.base import Bytes, ObjectInfo, Origin
    from cacheloader_daemon.tenants import Tenant


class GuardedOrigin:
    """An ``Origin`` that refuses what lies outside of a tenant's prefixes.

    Args:
        origin: The store; closed with this.
        tenant: Whose prefixes count.
        uid: Who asks, for errors.
    """

    def __init__(self, origin: Origin, *, tenant: Tenant, uid: int) -> None:
        self._origin = origin
        self._tenant = tenant
        self._uid = uid

    @property
    def tenant_name(self) -> str:
        """Whose limits of pace hold."""
        return self._tenant.name

    @property
    def origin_id(self) -> str:
        """That of the store."""
        return self._origin.origin_id

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Every object below the directory ``prefix`` that may be read."""
        self._check(prefix)
        async with aclosing(cast("AsyncGenerator[ObjectInfo, None]", self._origin.list(prefix))) as rows:
            async for info in rows:
                if not self._is_denied(info.uri):
                    yield info

    async def stat(self, uri: str) -> ObjectInfo:
        """Describe one object.

        Raises:
            OriginDenied: The tenant may not read it.
        """
        self._check(uri)
        return await self._origin.stat(uri)

    async def read_range(self, uri: str, byte_range: ByteRange, *, version: str) -> Bytes:
        """Bytes of one object.

        Raises:
            OriginDenied: The tenant may not read it.
        """
        self._check(uri)
        return await self._origin.read_range(uri, byte_range, version=version)

    async def aclose(self) -> None:
        """Close the store."""
        await self._origin.aclose()

    def _is_denied(self, uri: str) -> bool:
        try:
            return not self._tenant.prefixes.cover(uri)
        except ConfigError:
            return False  # named in the manifest, and refused with its reason when it is read

    def _check(self, uri: str) -> None:
        try:
            if self._tenant.prefixes.cover(uri):
                return
        except ConfigError as error:
            raise OriginDenied(f"user {self._uid} may not read it: {error.message}", uri=uri) from error
        raise OriginDenied(
            f"user {self._uid} may not read {uri}: the tenant {self._tenant.name!r} of this daemon may read "
            f"{self._tenant.prefixes.text}; the daemon's configuration can allow it (allow of that tenant)",
            uri=uri,
        )
