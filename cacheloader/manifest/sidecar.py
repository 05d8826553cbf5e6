"""Sample counts that somebody already wrote down beside the shards, and how to write them down.

===========================  ===========================================  ==========================
file                         written by                                   names relative to
===========================  ===========================================  ==========================
``shards.json``              ``cacheloader index``, wids                  its directory
``sizes.json``               OpenCLIP and others                          its directory
``.nv-meta/.info.json``      Megatron Energon                             the directory of .nv-meta
``.nv-meta/.info.yaml``      older Energon                                the directory of .nv-meta
``NAME_stats.json``          img2dataset, one for each ``NAME.tar``       (speaks of its shard alone)
===========================  ===========================================  ==========================

Counts are believed until a shard is read: its index has the last word (``check_count``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from cacheloader.errors import DatasetError, OriginDenied, OriginNotFound, masked_urls
from cacheloader.formats.base import index_samples
from cacheloader.manifest.asking import STATS_IN_FLIGHT, ask_each
from cacheloader.origin.location import base_url, canonical_url

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from cacheloader.manifest.asking import PatientOrigin
    from cacheloader.manifest.record import Manifest, ShardInfo
    from cacheloader.origin.base import ObjectInfo

_log = logging.getLogger(__name__)

_NAMES = ("shards.json", "sizes.json", ".nv-meta/.info.json", ".nv-meta/.info.yaml")
_MAX_BYTES = 256 << 20
_MAX_DIRECTORIES = 32
"""Data sets spread over more directories are asked about at their common root only."""


@asynccontextmanager
async def asked_ahead(urls: Sequence[str], origin: PatientOrigin) -> AsyncIterator[Mapping[str, Task[bytes | None]]]:
    """Content of the files that would lie beside the shards of ``urls``, asked for before these shards are known.

    Each question that one does not wait for is worth tens of milliseconds with a real store. What was asked in vain, or
    failed and is not needed, is forgotten at the end of the block.

    Args:
        urls: See ``locate``.
        origin: The store.

    Yields:
        By URI, what comes; ``None`` where there is no such file.
    """
    files = [directory + name for directory in _likely_directories(urls) for name in _NAMES]
    tasks = {file: asyncio.create_task(_content(file, origin)) for file in files}
    try:
        yield tasks
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def counts_beside(
    shards: Sequence[ObjectInfo], origin: PatientOrigin, ahead: Mapping[str, Task[bytes | None]] | None = None
) -> dict[str, int]:
    """Sample counts of those shards that a file beside them names.

    A file that cannot be understood, or names none of the shards, is passed over with a warning, and so is a count
    that comes with another size than the shard has.

    Args:
        shards: Whose counts are wanted.
        origin: The store.
        ahead: What was asked ahead.

    Returns:
        Samples by URI; shards that are not in it have to be counted.

    Raises:
        OriginError: The store failed; a missing or forbidden file is none.
    """
    wanted = {info.uri: info for info in shards}
    files = [directory + name for directory in _directories(wanted) for name in _NAMES]
    begun = ahead or {}
    contents = await ask_each(
        files, lambda uri: begun[uri] if uri in begun else _content(uri, origin), in_flight=STATS_IN_FLIGHT
    )
    counts: dict[str, int] = {}
    for file, content in zip(files, contents, strict=True):
        if content is not None and len(counts) < len(wanted):
            counts = await asyncio.to_thread(_counts, file, content, wanted) | counts
    return counts | await _counts_of_each([info for info in shards if info.uri not in counts], origin)


def check_count(shard: ShardInfo, index: bytes) -> None:
    """Make sure that the index of a shard has as many samples as the manifest promised.

    Raises:
        DatasetError: It has not.
    """
    found = index_samples(index)
    if found != shard.num_samples:
        raise DatasetError(
            f"shard {shard.uri} holds {found} samples, and {shard.num_samples} were written down for it beside the "
            f"shards ({', '.join(_NAMES)}); write a new shards.json with `cacheloader index`, or delete the old file",
            uri=shard.uri,
        )


def sidecar_text(manifest: Manifest, *, directory: str) -> str:
    """The content of a ``shards.json`` for the shards of ``manifest``, as wids also reads it.

    Args:
        manifest: The shards.
        directory: URI of the directory that the file is meant for, ends in ``/``; shards below it are named from there.
    """
    rows: dict[str, dict[str, str | int]] = {}
    for shard in map(manifest.shard, range(len(manifest))):
        name = shard.uri.removeprefix(directory)
        if name.startswith(("/", "./")) or "://" in name:  # would be read as something else than below here
            name = shard.uri
        rows[name] = {"url": name, "nsamples": shard.num_samples, "filesize": shard.size_bytes}
    lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows.values())
    return f'{{"wids_version": 1, "shardlist": [\n  {lines}\n]}}\n'


def write_sidecar(manifest: Manifest, path: Path, *, directory: str) -> None:
    """Write the content of a ``shards.json`` to ``path``, whole or not at all.

    Args:
        manifest: The shards.
        path: Where to write.
        directory: See ``sidecar_text``.

    Raises:
        OSError: The file cannot be written.
    """
    text = sidecar_text(manifest, directory=directory)
    path = path.resolve()
    if path.exists() and not path.is_file():  # such as /dev/stdout, which must not be replaced
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _likely_directories(urls: Sequence[str]) -> list[str]:
    """Where the shards of ``urls`` probably lie, and what is above.

    None for paths, where an answer takes no time, and for web servers, where a file of that name may be anything.
    """
    if len(urls) > _MAX_DIRECTORIES:
        return []
    bases = [base for base in map(base_url, urls) if "://" in base and not base.startswith(("http://", "https://"))]
    return sorted({found for base in bases for found in _directories([canonical_url(base)])})


def _directories(uris: Iterable[str]) -> list[str]:
    """Where to look: beside the shards, at the root that holds them all, and above it, where Energon may keep house."""
    parents = {uri[: uri.rindex("/") + 1] for uri in uris}
    first, last = min(parents), max(parents)
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    root = first[: first.rindex("/", 0, same) + 1]
    above = root[: root.rindex("/", 0, -1) + 1]
    found = {root} if len(parents) > _MAX_DIRECTORIES else {root, *parents}
    if above.count("/") > 2:  # still within the store
        found.add(above)
    return sorted(found, key=lambda directory: (-len(directory), directory))


async def _counts_of_each(shards: Sequence[ObjectInfo], origin: PatientOrigin) -> dict[str, int]:
    """Counts from one file a shard, if the first shard has one."""

    async def count(info: ObjectInfo) -> int | None:
        file = info.uri.removesuffix(".tar") + "_stats.json"
        content = await _content(file, origin)
        try:
            number = None if content is None else json.loads(content)["successes"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            _log.warning("passing over %s: it tells no sample count (%s)", masked_urls(file), error)
            return None
        return number if type(number) is int and number >= 0 else None

    unique = list({info.uri: info for info in shards}.values())
    if not unique or await count(unique[0]) is None:
        return {}
    counts = await ask_each(unique, count, in_flight=STATS_IN_FLIGHT)
    return {info.uri: number for info, number in zip(unique, counts, strict=True) if number is not None}


async def _content(uri: str, origin: PatientOrigin) -> bytes | None:
    try:
        info = await origin.stat(uri)
        if info.size_bytes > _MAX_BYTES:
            _log.warning(
                "passing over %s: %d bytes are too many for a list of counts", masked_urls(uri), info.size_bytes
            )
            return None
        return await origin.read(info, 0, info.size_bytes)
    except (OriginNotFound, OriginDenied):  # S3 answers "denied" for a missing object, unless listing is allowed
        return None


def _counts(file: str, content: bytes, wanted: dict[str, ObjectInfo]) -> dict[str, int]:
    try:
        document = _parsed(file, content)
        rows = list(_rows(document)) if document is not None else []
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _log.warning("passing over %s: it is no list of sample counts (%s)", masked_urls(file), error)
        return {}
    if document is None:
        return {}
    shown = masked_urls(file)
    directory = file.partition(".nv-meta/")[0] if "/.nv-meta/." in file else file[: file.rindex("/") + 1]
    counts: dict[str, int] = {}
    for name, count, size_bytes in rows:
        info = _named(name, directory, wanted)
        if info is None:
            continue
        if size_bytes not in {None, info.size_bytes}:
            uri = masked_urls(info.uri)
            _log.warning("%s is out of date: %s has %d bytes, not %s", shown, uri, info.size_bytes, size_bytes)
        elif counts.setdefault(info.uri, count) != count:
            _log.warning("passing over %s: it has two counts for %s", shown, masked_urls(info.uri))
            return {}
    if rows and len(counts) < len(wanted):
        _log.warning("%s names %d of %d shards; the others are counted", shown, len(counts), len(wanted))
    return counts


def _named(name: str, directory: str, wanted: dict[str, ObjectInfo]) -> ObjectInfo | None:
    """The shard that a file in ``directory`` means by ``name``; a full URI may be where both were copied from."""
    if "://" not in name and not name.startswith("/"):
        return wanted.get(directory + name.removeprefix("./"))
    return wanted.get(name) or wanted.get(directory + name.rpartition("/")[2])


def _parsed(file: str, content: bytes) -> Any:
    if not file.endswith(".yaml"):
        return json.loads(content)
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        _log.warning("passing over %s: PyYAML is not installed", masked_urls(file))
        return None
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from error


def _rows(document: Any) -> Iterator[tuple[str, int, int | None]]:
    """Name, samples and, where it is told, size of each shard, in any of the shapes that are in use."""
    if isinstance(document, dict):
        for key in ("shardlist", "shard_counts"):
            if key in document:
                document = document[key]
                break
    if isinstance(document, dict):
        document = [{"url": name, "nsamples": count} for name, count in document.items() if not name.startswith("__")]
    for row in document:
        count, size_bytes = row["nsamples"], row.get("filesize")
        if (
            type(count) is not int
            or count < 0
            or type(row["url"]) is not str
            or type(size_bytes) not in {int, type(None)}
        ):
            raise ValueError(f"{row!r} is no name with a count")
        yield row["url"], count, size_bytes
