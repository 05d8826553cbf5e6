"""The exceptions of fsspec's file systems, told apart. Each file system has its own, so statuses are looked for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fsspec.exceptions import BlocksizeMismatchError, FSTimeoutError

from cacheloader.errors import (
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginShortBody,
    OriginTimeout,
    OriginUnavailable,
)
from cacheloader.origin.failure import kind_for_status

if TYPE_CHECKING:
    from collections.abc import Iterator

# By name, so that no library is imported which the user's file system does not need.
KINDS: dict[str, type[OriginError]] = {
    # What botocore says of credentials.
    "NoCredentialsError": OriginDenied,
    "PartialCredentialsError": OriginDenied,
    "CredentialRetrievalError": OriginDenied,
    "NoAuthTokenError": OriginDenied,
    "TokenRetrievalError": OriginDenied,
    "SSOTokenLoadError": OriginDenied,
    "UnauthorizedSSOTokenError": OriginDenied,
    "ProfileNotFound": OriginDenied,
    # What botocore says of connections.
    "HTTPClientError": OriginUnavailable,
    "ConnectionError": OriginUnavailable,
    "EndpointConnectionError": OriginUnavailable,
    "ConnectionClosedError": OriginUnavailable,
    "SSLError": OriginUnavailable,
    "ProxyConnectionError": OriginUnavailable,
    "ConnectTimeoutError": OriginTimeout,
    "ReadTimeoutError": OriginTimeout,
    "IncompleteReadError": OriginShortBody,
    "ResponseStreamingError": OriginUnavailable,
    # What aiohttp says of connections.
    "ClientConnectionError": OriginUnavailable,
    "ClientPayloadError": OriginUnavailable,
    "ServerTimeoutError": OriginTimeout,
}
_BUILT_IN: tuple[tuple[type[BaseException], type[OriginError]], ...] = (
    (FSTimeoutError, OriginTimeout),
    (BlocksizeMismatchError, OriginShortBody),
    (asyncio.IncompleteReadError, OriginShortBody),
    (TimeoutError, OriginTimeout),
    (FileNotFoundError, OriginNotFound),
    (NotADirectoryError, OriginNotFound),
    (IsADirectoryError, OriginNotFound),
    (PermissionError, OriginDenied),
    (ConnectionError, OriginUnavailable),
    (EOFError, OriginUnavailable),
    (OSError, OriginUnavailable),
)


def described(error: Exception) -> tuple[type[OriginError], str]:
    """What ``error`` means: our class, and the cause in a few words."""
    for cause in _chain(error):
        # Names first: aiohttp gives a body that broke off a status of its own making.
        for ancestor in type(cause).__mro__:
            if ancestor.__module__ != "builtins" and ancestor.__name__ in KINDS:
                return KINDS[ancestor.__name__], _words(cause)
        status, code, said = _answer(cause)
        if status:
            words = f"{status} {code}".strip() + (f" ({said})" if said else "")
            return kind_for_status(status, code), words
    for known, kind in _BUILT_IN:
        if isinstance(error, known):
            return kind, _words(error)
    return OriginError, f"{type(error).__name__}: {_words(error)}"


def answer_of(error: Exception) -> tuple[int, str]:
    """HTTP status and the store's own code, 0 and "" where ``error`` has none."""
    for cause in _chain(error):
        status, code, _ = _answer(cause)
        if status:
            return status, code
    return 0, ""


def _answer(error: BaseException) -> tuple[int, str, str]:
    """HTTP status, the store's code and message, as far as ``error`` carries them."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        told = response.get("Error", {})
        code = str(told.get("Code", ""))
        return int(status), "" if code.isdigit() else code, str(told.get("Message", "")).strip(". ")
    for holder in (error, response):  # aiohttp, gcsfs, requests, httpx
        for name in ("status", "status_code", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 300 <= status < 600:
                return status, "", str(getattr(error, "message", "")).strip(". ")
    return 0, "", ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(5):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return text or type(error).__name__
