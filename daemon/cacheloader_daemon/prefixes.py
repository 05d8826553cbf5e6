"""URL prefixes that a tenant may read, compared so that no other spelling of a URL gets around them.

A prefix means itself and what lies below it: `s3://team/` covers `s3://team/a.tar` and not `s3://team-b/a.tar`. Engines
and servers differ in what they decode, so a URL is compared in every reading: as it is, and percent-decoded until
nothing changes. All readings have to be allowed, and none may be denied. What two programs could read as two places
(`..`, empty segments, backslashes, control characters, a user name in a web URL) is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from cacheloader.errors import ConfigError

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_SYNONYMS = {"s3a": "s3", "gcs": "gs", "local": "file", "abfss": "abfs"}
_PORTS = {"http": "80", "https": "443"}
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\\]")
_HOST = re.compile(r"[a-z0-9._@\[\]:-]*")
_MAX_DECODINGS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlPrefixes:
    """What may be read.

    Attributes:
        allow: Prefixes; a URL below none of them may not be read. A scheme alone (`s3://`) is a prefix.
        deny: Prefixes of what may not be read although ``allow`` covers it.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    _allowed: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _denied: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_allowed", tuple(map(_prefix, self.allow)))
        object.__setattr__(self, "_denied", tuple(map(_prefix, self.deny)))

    def cover(self, url: str) -> bool:
        """Whether ``url`` may be read.

        Raises:
            ConfigError: It can be read as more than one place.
        """
        seen = readings(url)
        return all(_lies_below(one, self._allowed) for one in seen) and not any(
            _lies_below(one, self._denied) for one in seen
        )

    @property
    def folders(self) -> tuple[str, ...]:
        """Local folders and files among the allowed prefixes, as absolute paths."""
        return tuple(prefix.removeprefix("file://") or "/" for prefix in self._allowed if prefix.startswith("file:"))

    @property
    def text(self) -> str:
        """For an error: `s3://team/, but not s3://team/private/`."""
        allowed = ", ".join(self.allow) or "nothing"
        return f"{allowed}, but not {', '.join(self.deny)}" if self.deny else allowed


def readings(url: str) -> tuple[str, ...]:
    """All that ``url`` may mean to an engine or a server, each in its usual spelling.

    Raises:
        ConfigError: It can be read as more than one place.
    """
    match = _URL.fullmatch(url) or _URL.fullmatch(f"file://{url}")
    assert match is not None
    scheme = _SYNONYMS.get(match[1].lower(), match[1].lower())
    rest = match[2]
    if scheme in _PORTS:
        rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    authority, slash, path = rest.partition("/")
    root = f"{scheme}://{_authority(url, scheme, authority)}"
    found = [path]
    for _ in range(_MAX_DECODINGS):
        decoded = unquote(found[-1], errors="surrogateescape")
        if decoded == found[-1]:
            break
        found.append(decoded)
    else:
        raise _ambiguous(url, "it is percent-encoded again and again")
    for one in found:
        _check_path(url, one)
    return tuple(f"{root}{slash}{one}" for one in found)


def _authority(url: str, scheme: str, authority: str) -> str:
    if scheme == "file":
        if authority:
            raise _ambiguous(url, "a local path begins with /")
        return ""
    lowered = authority.lower()
    if scheme in _PORTS:
        if "@" in lowered:
            raise _ambiguous(url, "it holds a user name; pass it in the storage option headers")
        host, colon, port = lowered.rpartition(":")
        if colon and port.isdecimal():
            host = host.rstrip(".")
            lowered = host if str(int(port)) == _PORTS[scheme] else f"{host}:{int(port)}"
        lowered = lowered.rstrip(".:")
    elif lowered != authority and scheme in {"s3", "gs", "az"}:
        raise _ambiguous(url, "names of buckets are in lower case")
    if not _HOST.fullmatch(lowered):
        raise _ambiguous(url, "its host or bucket has unusual characters")
    return lowered


def _check_path(url: str, path: str) -> None:
    if _UNPRINTABLE.search(path):
        raise _ambiguous(url, "it has a backslash or a control character")
    segments = path.split("/")
    if "." in segments or ".." in segments:
        raise _ambiguous(url, "a part of its path is . or ..")
    if "" in segments[:-1]:
        raise _ambiguous(url, "it has an empty part between two slashes")


def _ambiguous(url: str, why: str) -> ConfigError:
    return ConfigError(
        f"{url} may mean more than one place ({why}), so no rule of this daemon can allow it; write it plainly", uri=url
    )


def _prefix(text: str) -> str:
    """A prefix as readings are compared with it: without the slash at its end."""
    if not _URL.fullmatch(text) and not text.startswith("/"):
        raise ConfigError(f'{text!r} is no URL prefix; write it like "s3://bucket/folder/" or "/mnt/volume/folder/"')
    seen = readings(text)
    if len(seen) > 1:
        raise ConfigError(f"the URL prefix {text!r} is percent-encoded; write it plainly")
    return seen[0].rstrip("/") if not seen[0].endswith("://") else seen[0]


def _lies_below(url: str, prefixes: tuple[str, ...]) -> bool:
    return any(
        url.startswith(prefix) if prefix.endswith("://") else url == prefix or url.startswith(f"{prefix}/")
        for prefix in prefixes
    )
