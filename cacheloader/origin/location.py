"""What a URL says before any store is asked: scheme, store, directory. Object keys are taken literally.

Outside of `http(s)://`, a URL is its scheme, its store and the key as it is: nothing is percent-decoded, and ``?`` or
``#`` are ordinary characters of a key.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from cacheloader.errors import ConfigError

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_MAGIC = re.compile(r"[*?\[{]")
_HOSTED = {"s3", "gs", "az", "abfs", "http", "https"}
_SYNONYMS = {"s3a": "s3", "gcs": "gs", "local": "file", "abfss": "abfs"}


def scheme_of(url: str) -> str:
    """The scheme of ``url`` under its usual name (``s3`` for ``s3a``); ``"file"`` for a plain path."""
    match = _SCHEME.match(url)
    if match is None:
        return "file"
    scheme = match[1].lower()
    return _SYNONYMS.get(scheme, scheme)


def canonical_url(url: str) -> str:
    """``url`` as it appears in a manifest: the scheme's usual name, and `file:///…` for a path.

    Args:
        url: URL or absolute path. A trailing ``/`` stays.

    Raises:
        ConfigError: ``url`` is empty, names no store, or chains several protocols.
    """
    if not url:
        raise ConfigError("an empty URL names no data; pass a URL such as s3://bucket/train/ or a path")
    scheme = scheme_of(url)
    if "::" in url.split("://", maxsplit=1)[0]:
        raise ConfigError(f"{url} chains protocols, which is not supported; pass the last URL alone")
    rest = _SCHEME.sub("", url, count=1)
    if scheme == "file":
        if rest.startswith("~"):
            raise ConfigError(f"{url} starts with ~, which no daemon can expand; pass an absolute path")
        path = f"{PurePosixPath('/') / rest}"
        return f"file://{path}{'/' if rest.endswith('/') and path != '/' else ''}"
    if not rest or (scheme in _HOSTED and rest.startswith("/")):
        raise ConfigError(f"{url} names no bucket or host; pass a URL such as {scheme}://bucket/train/")
    return f"{scheme}://{rest}"


def store_url(url: str) -> str:
    """The root of the store that ``url`` belongs to, with a trailing ``/``: `s3://bucket/`, `file:///`."""
    match = _SCHEME.match(url)
    if match is None or scheme_of(url) == "file":
        return "file:///"
    return f"{url[: match.end()]}{url[match.end() :].partition('/')[0]}/"


def key_of(uri: str) -> str:
    """The part of ``uri`` behind its store, without a leading ``/``."""
    match = _SCHEME.match(uri)
    if match is None:
        return uri.lstrip("/")
    return uri[match.end() :].partition("/")[2].lstrip("/")


def base_url(pattern: str) -> str:
    """The deepest directory (ends in ``/``) below which everything lies that ``pattern`` can match."""
    match = _SCHEME.match(pattern)
    start = match.end() if match else 0
    magic = _MAGIC.search(pattern, start)
    literal = pattern[: magic.start()] if magic else pattern
    cut = literal.rfind("/", start) + 1
    return literal[:cut] if cut else f"{literal}/"
