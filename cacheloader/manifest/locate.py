"""From what the user wrote to the shards that are there: which objects, in which order, of which size and version."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from cacheloader.errors import ConfigError, EmptyDataset, OriginError, OriginNotFound, masked_urls
from cacheloader.formats import registry
from cacheloader.manifest.asking import LISTINGS_IN_FLIGHT, STATS_IN_FLIGHT, ask_each
from cacheloader.manifest.patterns import MAX_SHARDS, expand_all, glob_regex, is_glob
from cacheloader.origin.location import base_url, canonical_url, store_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cacheloader.formats.base import ShardFormat
    from cacheloader.manifest.asking import PatientOrigin
    from cacheloader.origin.base import ObjectInfo

_log = logging.getLogger(__name__)

LISTING_STAGE = "listing"
CHECKING_STAGE = "checking shards"

MAX_GLOBS = 1000
"""Each is compared with every object below its directory."""

_LIST_FROM = 1000
"""So many named shards in one directory are described by listing it, 1,000 an answer, and not one by one."""


async def locate(
    urls: Sequence[str],
    origin: PatientOrigin,
    *,
    shard_format: ShardFormat | None,
    progress: Callable[[str, int, int], None],
    max_shards: int = MAX_SHARDS,
) -> list[ObjectInfo]:
    """The shards that ``urls`` stand for.

    Brace patterns and lists keep their order and may name a shard more than once, which weighs it more. What is found
    by listing, below a directory or by a glob, is sorted bytewise by URI. Of what a directory holds, files with an
    ending of the format are shards, unless a part of their path below it starts with ``.`` or ``_``. A glob takes what
    it matches, and leaves files of other endings out where some have the right one. A name without an ending is a
    directory if something lies below it, and else a shard.

    Args:
        urls: URLs, absolute paths, brace patterns, globs or directories.
        origin: The store that answers for all of them.
        shard_format: Whose endings make a file of a directory a shard; ``None`` for those of all formats.
        progress: Called with (stage, done, total).
        max_shards: Names, or objects that a listing finds, that are refused as too many if there are more.

    Raises:
        ConfigError: The URLs cannot be meant like this, as with two stores, a compressed shard or too many shards.
        EmptyDataset: One of the URLs stands for no shard.
        OriginNotFound: A shard that is named does not exist.
        OriginError: The store failed otherwise.
    """
    # What is done for each of perhaps a million shards is done in a thread: the loop has others to serve.
    names, askers = await asyncio.to_thread(_understood, urls, max_shards)
    listings = await _list_all(askers, origin, progress, max_shards)
    named = await asyncio.to_thread(_objects, names, listings)
    described = await _describe(named, origin, listings, progress)
    suffixes = tuple(shard_format.suffixes) if shard_format else registry.all_suffixes()
    return await asyncio.to_thread(_chosen, names, described, listings, suffixes)


def store_of_all(urls: Iterable[str]) -> str:
    """The one store that answers for all ``urls``: scheme and bucket, host or file system, with a ``/`` at the end.

    Raises:
        ConfigError: There are several, or its name is a pattern, or there is no URL.
    """
    stores = dict.fromkeys(map(store_url, urls))
    if not stores:
        raise ConfigError("a data set needs at least one URL, path or pattern, and none was given")
    store = next(iter(stores))
    if len(stores) > 1:
        raise ConfigError(f"a data set has shards in {' and '.join(stores)}; keep all shards of one in a single store")
    if is_glob(store) or "{" in store:
        raise ConfigError(f"{store} has a pattern in place of the bucket or host; name one")
    return store


@dataclass(slots=True, kw_only=True, eq=False)
class _Listing:
    """What lies below a directory.

    Attributes:
        looked_at: Objects, of whatever kind.
        kept: Those that a URL may stand for, sorted by URI.
        missing: Why there is nothing, if the store says that the directory does not exist.
    """

    looked_at: int = 0
    kept: list[ObjectInfo] = field(default_factory=list)
    missing: OriginNotFound | None = None


def _understood(urls: Sequence[str], max_shards: int) -> tuple[list[str], dict[str, list[str]]]:
    """What is named, in order, and of each directory to be listed, who asks for it."""
    names = [_absolute(url) for url in expand_all(urls, max_shards=max_shards)]
    store_of_all(names)
    globs = sum(map(is_glob, names))
    if globs > MAX_GLOBS:
        raise ConfigError(
            f"the patterns {', '.join(url[:200] for url in urls[:3])} stand for {globs} globs, and more than "
            f"{MAX_GLOBS} would take too long to compare with every object; name the directory, or the shards"
        )
    askers: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if directory := _directory(name):
            askers.setdefault(directory, []).append(name)
    return names, askers


def _absolute(url: str) -> str:
    if "://" not in url and not url.startswith("/"):
        raise ConfigError(f"the path {url!r} is relative, and the daemon works elsewhere; pass an absolute one")
    return canonical_url(url)


def _directory(name: str) -> str:
    """The directory to list for ``name``, "" if it can only be an object."""
    if is_glob(name):
        return base_url(name)
    if name.endswith("/"):
        return name
    return "" if registry.is_file_name(name) or name.startswith(("http://", "https://")) else name + "/"


def _objects(names: list[str], listings: dict[str, _Listing]) -> list[str]:
    """The names that are those of objects: nothing lies below them."""
    objects = []
    for name in dict.fromkeys(names):
        if name.endswith("/") or is_glob(name):
            continue
        directory = _directory(name)
        if not directory or not listings[directory].looked_at:
            objects.append(name)
    return objects


async def _list_all(
    askers: dict[str, list[str]],
    origin: PatientOrigin,
    progress: Callable[[str, int, int], None],
    max_shards: int,
) -> dict[str, _Listing]:
    listings = {directory: _Listing() for directory in askers}
    room = max_shards

    async def search(directory: str) -> None:
        nonlocal room
        listing = listings[directory]

        def seen(count: int) -> None:
            listing.looked_at = count
            progress(LISTING_STAGE, sum(each.looked_at for each in listings.values()), 0)

        def keep(info: ObjectInfo) -> bool:
            return any(_stands_for(name, info.uri) for name in askers[directory])

        try:
            listing.kept = await origin.search(directory, keep=keep, seen=seen, keep_at_most=max(room, 0))
            room -= len(listing.kept)
            if room < 0:  # another listing, at the same time, took what was left
                raise ConfigError(
                    f"there are more shards below {directory} and other directories than the {max_shards} that a data "
                    "set may have here; name a smaller part of them",
                    uri=directory,
                )
        except OriginNotFound as error:
            listing.missing = error

    await ask_each(askers, search, in_flight=LISTINGS_IN_FLIGHT)
    return listings


def _stands_for(name: str, uri: str) -> bool:
    if is_glob(name):
        return glob_regex(name).fullmatch(uri) is not None
    path = uri[len(_directory(name)) :]
    return registry.is_file_name(path) and not any(part[:1] in {".", "_"} for part in path.split("/"))


def _chosen(
    names: list[str], described: dict[str, ObjectInfo], listings: dict[str, _Listing], suffixes: tuple[str, ...]
) -> list[ObjectInfo]:
    """The shards of all names, in order."""
    shards: list[ObjectInfo] = []
    for name in names:
        if name in described:
            shards.append(described[name])
        else:
            shards += _below(name, listings[_directory(name)], suffixes)
    for info in shards:
        if not info.uri.isascii() and any("\ud800" <= character <= "\udfff" for character in info.uri):
            shown = info.uri.encode("utf-8", "surrogateescape")
            raise ConfigError(f"the name of {shown!r} is not UTF-8; rename it")
    if len({info.uri for info in shards}) < len(shards):
        uri, times = Counter(info.uri for info in shards).most_common(1)[0]
        _log.warning("shards are named more than once and will be read as often: %s %d times", masked_urls(uri), times)
    return shards


def _below(name: str, listing: _Listing, suffixes: tuple[str, ...]) -> list[ObjectInfo]:
    found = [info for info in listing.kept if _stands_for(name, info.uri)]
    shards = [info for info in found if registry.has_suffix(info.uri, suffixes)]
    return shards or (found if is_glob(name) else []) or _explain_nothing(name, listing, found, suffixes)


def _explain_nothing(name: str, listing: _Listing, found: list[ObjectInfo], suffixes: tuple[str, ...]) -> NoReturn:
    if found:
        registry.detect(found[0].uri)
    if listing.missing:
        raise listing.missing
    rule = (
        "matches it (wildcards stand for no slash and no leading dot, and [[] for a bracket)"
        if is_glob(name)
        else f"ends in {' or '.join(suffixes)} and has no part below it that starts with a dot or an underscore"
    )
    raise EmptyDataset(
        f"{name} stands for no shard: of {listing.looked_at} objects below {_directory(name)} none {rule}; "
        "check the URL, or name the shards by a pattern",
        uri=name,
    )


async def _describe(
    named: list[str],
    origin: PatientOrigin,
    listings: dict[str, _Listing],
    progress: Callable[[str, int, int], None],
) -> dict[str, ObjectInfo]:
    """Size and version of each named object."""
    described = await _describe_by_listing(named, origin, progress)
    remaining = [uri for uri in named if uri not in described]

    async def describe(uri: str) -> ObjectInfo:
        try:
            return await origin.stat(uri)
        except OriginNotFound as error:
            listing = listings.get(_directory(uri))
            if listing and not listing.missing:
                raise EmptyDataset(
                    f"{uri} is no object, and no directory that holds any: {error}", uri=error.uri
                ) from error
            raise OriginNotFound(
                f"shard {uri}, one of {len(named)} named, does not exist: {error}", uri=error.uri
            ) from error

    def answered(count: int) -> None:
        progress(CHECKING_STAGE, len(described) + count, len(named))

    answers = await ask_each(remaining, describe, in_flight=STATS_IN_FLIGHT, progress=answered)
    return described | dict(zip(remaining, answers, strict=True))


async def _describe_by_listing(
    named: list[str], origin: PatientOrigin, progress: Callable[[str, int, int], None]
) -> dict[str, ObjectInfo]:
    """As many of the named objects as can be described with far fewer questions than there are objects."""
    neighbours: dict[str, set[str]] = {}
    for uri in named:
        neighbours.setdefault(uri[: uri.rindex("/") + 1], set()).add(uri)
    described: dict[str, ObjectInfo] = {}
    for directory, uris in neighbours.items():
        if len(uris) < _LIST_FROM or directory.startswith(("http://", "https://")):
            continue
        found: list[ObjectInfo] = []
        try:
            found = await origin.search(
                directory,
                keep=partial(_is_among, uris),
                seen=lambda looked_at: progress(LISTING_STAGE, looked_at, 0),
                stop_after=4 * len(uris),  # a directory that holds much else is not worth it
            )
        except OriginError as error:
            shown = masked_urls(directory)
            _log.info("asking for %d shards one by one, for %s cannot be listed: %s", len(uris), shown, error)
        described.update((info.uri, info) for info in found)
    return described


def _is_among(uris: set[str], info: ObjectInfo) -> bool:
    return info.uri in uris
