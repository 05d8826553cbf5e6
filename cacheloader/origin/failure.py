"""Which of our errors an answer of a store means, and the one sentence that tells the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheloader.errors import (
    OriginChanged,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginShortBody,
    OriginThrottled,
    OriginTimeout,
    OriginUnavailable,
    masked_urls,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cacheloader.keys import ByteRange

# Stores answer some conditions under a status that means something else, so their own code decides first.
# Source: Amazon S3, Azure Blob Storage and Google Cloud Storage error code lists.
_CODES: dict[str, type[OriginError]] = {
    "AccessDenied": OriginDenied,
    "AuthenticationFailed": OriginDenied,
    "AuthorizationFailure": OriginDenied,
    "ExpiredToken": OriginDenied,
    "InvalidAccessKeyId": OriginDenied,
    "InvalidToken": OriginDenied,
    "RequestTimeTooSkewed": OriginDenied,
    "SignatureDoesNotMatch": OriginDenied,
    "TokenRefreshRequired": OriginDenied,
    "BlobNotFound": OriginNotFound,
    "ContainerNotFound": OriginNotFound,
    "NoSuchBucket": OriginNotFound,
    "NoSuchKey": OriginNotFound,
    "ConditionNotMet": OriginChanged,
    "PreconditionFailed": OriginChanged,
    "InvalidRange": OriginShortBody,
    "RequestLimitExceeded": OriginThrottled,
    "ServerBusy": OriginThrottled,
    "SlowDown": OriginThrottled,
    "Throttling": OriginThrottled,
    "ThrottlingException": OriginThrottled,
    "TooManyRequests": OriginThrottled,
    "rateLimitExceeded": OriginThrottled,
    "userRateLimitExceeded": OriginThrottled,
    "OperationTimedOut": OriginTimeout,
    "RequestTimeout": OriginTimeout,
    "InternalError": OriginUnavailable,
}
_STATUSES: dict[int, type[OriginError]] = {
    401: OriginDenied,
    403: OriginDenied,
    404: OriginNotFound,
    408: OriginTimeout,
    410: OriginNotFound,
    412: OriginChanged,
    416: OriginShortBody,
    429: OriginThrottled,
    # A 503 without a code (the answer to a HEAD has no body) is read as "slow down": backing off harms nobody.
    503: OriginThrottled,
    504: OriginTimeout,
}
_WAYS_OUT: dict[type[OriginError], str] = {
    OriginNotFound: "check the spelling, the bucket and the endpoint_url",
    OriginDenied: (
        "check the credentials in storage_options, in the environment or in the profile,"
        " or pass anon=True for public data"
    ),
    OriginThrottled: "lower the number of parallel requests if it persists",
    OriginChanged: "the data set was modified: build its manifest again, and do not write to shards in use",
    OriginTimeout: "check the network and the endpoint_url, or raise the deadline",
    OriginShortBody: "check that the object is complete and that no proxy alters responses",
    OriginUnavailable: "check the endpoint_url, the network and the store's state",
    OriginError: "see the cause",
}


def kind_for_status(status: int, code: str = "") -> type[OriginError]:
    """The error that an HTTP status means, refined by the store's own error code where it gave one."""
    by_status = _STATUSES.get(status, OriginUnavailable if status >= 500 else OriginError)
    return _CODES.get(code, by_status)


def failure(
    kind: type[OriginError], *, action: str, uri: str, cause: str, way_out: str = "", secrets: Iterable[str] = ()
) -> OriginError:
    """An error whose message says what was tried, on which object, what came back and what to do.

    Args:
        kind: Class of the error.
        action: What was tried, such as ``"listing"``.
        uri: The object or prefix.
        cause: What the store or the library said.
        way_out: What the user can do, if something better is known than the advice for ``kind``.
        secrets: Values that must not appear.
    """
    message = f"{action} {uri} failed: {cause.strip().rstrip('.;')}; {way_out or _WAYS_OUT[kind]}"
    return kind(masked(message, secrets), uri=masked(uri, secrets))


def no_web_listing(prefix: str) -> OriginError:
    """The error for listing a web server."""
    return failure(
        OriginError,
        action="listing",
        uri=prefix,
        cause="a web server cannot be listed",
        way_out="name the files by a brace pattern such as train-{000000..000099}.tar, or pass a list of URLs",
    )


def reading(byte_range: ByteRange) -> str:
    """``action`` of a ranged read."""
    return f"reading bytes [{byte_range.start}, {byte_range.stop}) of"


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` without ``secrets``, and without user names and query strings of URLs, where signatures stand."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return masked_urls(text)


def secret_values(options: object, *, public: Iterable[str]) -> list[str]:
    """Every text in ``options`` that is not the value of a ``public`` name, longest first.

    Short ones are left out: to mask every ``"x"`` would make messages unreadable, and guards nothing.
    """
    found: set[str] = set()

    def visit(value: object) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                if name not in public:
                    visit(item)
        elif isinstance(value, str) and len(value) >= 6:
            found.add(value)

    visit(options)
    return sorted(found, key=len, reverse=True)
