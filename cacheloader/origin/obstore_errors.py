"""obstore's exceptions, told apart. Most of what matters stands in their texts only."""

from __future__ import annotations

import re

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    InvalidPathError,
    JoinError,
    NotFoundError,
    NotModifiedError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from cacheloader.errors import (
    OriginChanged,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginTimeout,
    OriginUnavailable,
)
from cacheloader.origin.failure import kind_for_status

# obstore raises the built-in exception where there is one; ValueError for a path it cannot parse.
FOREIGN = (BaseError, FileNotFoundError, PermissionError, TimeoutError, OSError, ValueError)

KINDS: dict[type[Exception], type[OriginError]] = {
    AlreadyExistsError: OriginError,
    BaseError: OriginError,
    GenericError: OriginUnavailable,
    InvalidPathError: OriginError,
    JoinError: OriginUnavailable,
    NotFoundError: OriginNotFound,
    NotModifiedError: OriginError,
    NotSupportedError: OriginError,
    PermissionDeniedError: OriginDenied,
    PreconditionError: OriginChanged,
    UnauthenticatedError: OriginDenied,
    UnknownConfigurationKeyError: OriginError,
}
"""What each exception means if its text says nothing better; a test compares it with what obstore has."""

_BUILT_IN: dict[type[Exception], type[OriginError]] = {
    FileNotFoundError: OriginNotFound,
    PermissionError: OriginDenied,
    TimeoutError: OriginTimeout,
    OSError: OriginUnavailable,
    ValueError: OriginError,
}
_STATUS = re.compile(r"status code: (\d{3})(?: (\w[\w ]*\w))?")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_TEXT = re.compile(r"<Message>\s*([^<]*?)\s*</Message>")
_DETAIL = re.compile(r'(?:message|error): "([^"]+)"')
# Hosts that hand out the credentials of an instance. An error of theirs means that there are none.
_INSTANCE = re.compile(r"//(?:169\.254\.169\.254|169\.254\.170\.2|metadata\.google\.internal|metadata)[:/]")


def described(error: Exception) -> tuple[type[OriginError], str, str]:
    """What ``error`` means.

    Returns:
        Our class, the cause in a few words, and the way out if something better is known than the usual advice.
    """
    text, _, detail = str(error).partition("\n\nDebug source")
    if _INSTANCE.search(text):
        return OriginDenied, "there are no credentials, not from the instance either", ""
    status = _STATUS.search(text)
    if status is not None:
        return _answered(int(status[1]), status[2] or "", text)
    kind = next((found for known, found in (KINDS | _BUILT_IN).items() if type(error) is known), OriginUnavailable)
    if isinstance(error, NotSupportedError) and "Range" in text:
        return OriginError, "the server does not send parts of files", "serve the files from a server that does"
    if isinstance(error, InvalidPathError):
        way_out = 'rename the object, or pass storage_options={"engine": "fsspec"}'
        return kind, f"the engine obstore cannot use a key ({_one_line(text)})", way_out
    if "TimedOut" in detail or "timed out" in detail:
        kind = OriginTimeout
    causes = _DETAIL.findall(detail)
    said = f" ({causes[-1].lower()})" if causes and causes[-1] not in text else ""
    return kind, f"{_one_line(text).rpartition(' - ')[2]}{said}", ""


def answer_of(error: Exception) -> tuple[int, str]:
    """HTTP status and the store's own code, 0 and "" where ``error`` has none."""
    text = str(error).partition("\n\nDebug source")[0]
    status, code = _STATUS.search(text), _CODE.search(text)
    return int(status[1]) if status else 0, code[1] if code else ""


def _answered(status: int, phrase: str, text: str) -> tuple[type[OriginError], str, str]:
    code = match[1] if (match := _CODE.search(text)) else ""
    said = match[1] if (match := _TEXT.search(text)) else ""
    kind = kind_for_status(status, code)
    cause = f"{status} {code or phrase}".strip() + (f" ({said.rstrip('.')})" if said else "")
    way_out = ""
    if status in {301, 307, 308} or "region" in said.lower():
        way_out = "the bucket is in another region: pass client_kwargs={'region_name': …} in storage_options"
        if region := re.search(r"<Region>\s*([\w-]+)\s*</Region>", text):
            way_out = way_out.replace("…", f"'{region[1]}'")
    return kind, cause, way_out


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
