"""From a data set's description to its manifest: find the shards, then learn how many samples each has."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from cacheloader.errors import ConfigError, EmptyDataset
from cacheloader.formats import registry
from cacheloader.manifest.asking import PatientOrigin
from cacheloader.manifest.locate import locate
from cacheloader.manifest.patterns import MAX_SHARDS
from cacheloader.manifest.record import Manifest, ShardInfo
from cacheloader.manifest.sidecar import asked_ahead, counts_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cacheloader.formats.base import ShardFormat
    from cacheloader.origin.base import ObjectInfo, Origin
    from cacheloader.protocol.messages import DatasetSpec

_log = logging.getLogger(__name__)

COUNTING_STAGE = "counting samples"


class SampleCounter(Protocol):
    """Whoever can tell how many samples a shard has, such as the daemon, which keeps what it read for it."""

    async def count(self, shards: Sequence[ObjectInfo], *, progress: Callable[[int, int], None]) -> list[int]:
        """Samples of each shard, in order.

        Args:
            shards: All of one format, none twice.
            progress: Called with (shards counted, shards in all).

        Raises:
            CorruptShard: A shard cannot be parsed.
            OriginError: The store failed.
        """
        ...


async def resolve(
    spec: DatasetSpec,
    origin: Origin,
    counter: SampleCounter,
    *,
    progress: Callable[[str, int, int], None] = lambda _stage, _done, _total: None,
    max_shards: int = MAX_SHARDS,
) -> Manifest:
    """The manifest of the data set that ``spec`` describes.

    Args:
        spec: URLs and format.
        origin: The store that answers for all URLs.
        counter: Asked for the shards whose sample counts are not written down beside them.
        progress: Called with (stage, done, total); total is 0 while it is unknown.
        max_shards: What a data set of more shards is refused for; a daemon that serves strangers wants fewer.

    Raises:
        ConfigError: The URLs or the format cannot be meant like this.
        EmptyDataset: There are no shards, or no samples in them.
        CorruptShard: A shard had to be counted and cannot be parsed.
        OriginError: The store failed.
    """
    patient = PatientOrigin(origin)
    named = registry.named(spec.format) if spec.format else None
    async with asked_ahead(spec.urls, patient) as ahead:
        shards = await locate(spec.urls, patient, shard_format=named, progress=progress, max_shards=max_shards)
        shard_format = await asyncio.to_thread(format_of, spec.format, [info.uri for info in shards])
        counts = await counts_beside(shards, patient, ahead)
    uncounted = list({info.uri: info for info in shards if info.uri not in counts}.values())
    if uncounted:
        _log.info("counting the samples of %d shards of %d", len(uncounted), len(shards))
        progress(COUNTING_STAGE, 0, len(uncounted))
        numbers = await counter.count(uncounted, progress=lambda done, total: progress(COUNTING_STAGE, done, total))
        counts |= {info.uri: number for info, number in zip(uncounted, numbers, strict=True)}
    if not any(counts.values()):
        raise EmptyDataset(
            f"the {len(shards)} shards of {', '.join(spec.urls[:3])} hold no sample; a {shard_format.name} shard needs "
            "members that form samples by their names: check how the shards were packed",
            uri=spec.urls[0],
        )
    return await asyncio.to_thread(_manifest, shards, counts, shard_format.name, origin.origin_id)


def _manifest(shards: Sequence[ObjectInfo], counts: dict[str, int], format_name: str, origin_id: str) -> Manifest:
    rows = (
        ShardInfo(uri=info.uri, size_bytes=info.size_bytes, version=info.version, num_samples=counts[info.uri])
        for info in shards
    )
    return Manifest.build(rows, format=format_name, origin_id=origin_id)


def format_of(name: str, uris: Iterable[str]) -> ShardFormat:
    """The format of shards: the one called ``name``, or if that is "" the one that the endings of ``uris`` tell.

    Raises:
        ConfigError: There is no such format, an ending tells none, or two tell different ones.
    """
    if name:
        return registry.named(name)
    examples: dict[str, str] = {}
    for uri in uris:
        examples.setdefault(registry.detect(uri).name, uri)
    if len(examples) > 1:
        several = ", ".join(f"{format_name} ({uri})" for format_name, uri in examples.items())
        raise ConfigError(f"the shards of a data set have one format, and these have several: {several}")
    if not examples:
        raise ConfigError("a data set without shards has no format; pass format=")
    return registry.named(next(iter(examples)))
