"""What the rest of cacheloader knows of a remote store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from typing_extensions import Buffer

    from cacheloader.keys import ByteRange

Bytes: TypeAlias = "Buffer"
"""Contiguous bytes in host memory that can be written to a file without a copy."""


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One object as the store describes it.

    Attributes:
        uri: Full URI; reading it through the same origin gives this object.
        size_bytes: Length.
        version: Entity tag, generation, or modification time for files; "" if the store gives none. Two reads under
            the same version see the same bytes.
    """

    uri: str
    size_bytes: int
    version: str


class Origin(Protocol):
    """One store (a bucket, a host, a mounted file system) with its credentials.

    All methods raise only ``OriginError`` for what the store did, one attempt each: the caller retries. Every method
    ends within the deadline that its caller sets with ``asyncio.timeout``; cancelling leaves nothing behind.
    """

    @property
    def origin_id(self) -> str:
        """Which store answers: scheme, endpoint, bucket or host. Equal ids and URIs are the same object. No secrets."""
        ...

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Every object whose URI starts with the directory ``prefix`` (ends in ``/``), in no promised order.

        Raises:
            OriginNotFound: The bucket or directory does not exist, where the store can tell.
        """
        ...

    async def stat(self, uri: str) -> ObjectInfo:
        """Describe one object.

        Raises:
            OriginNotFound: There is no such object.
        """
        ...

    async def read_range(self, uri: str, byte_range: ByteRange, *, version: str) -> Bytes:
        """Exactly the bytes of ``byte_range``, from exactly ``version`` ("" means any).

        Raises:
            OriginChanged: The object now has another version.
            OriginShortBody: The store sent another number of bytes.
        """
        ...

    async def aclose(self) -> None:
        """Free connections and threads; calling it again does nothing."""
        ...
