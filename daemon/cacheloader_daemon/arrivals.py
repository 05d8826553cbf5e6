"""Shards on their way: how far each has come, what went wrong with it, and which origins deliver nothing at present."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from cacheloader.errors import OriginError, masked_urls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheloader_daemon.shards import ShardSource


class News(msgspec.Struct, frozen=True, kw_only=True):
    """How a request stands, as ``protocol.messages.Progress`` tells it.

    Attributes:
        stage: What is being done, and the last thing that went wrong with it.
        done: Bytes that have arrived.
        total: Bytes in all, 0 if that is not the point.
    """

    stage: str
    done: int = 0
    total: int = 0


class OriginTrouble(msgspec.Struct, frozen=True, kw_only=True):
    """A store that has failed since it last delivered a shard.

    Attributes:
        origin: Which; without secrets.
        failures: Requests that failed since then.
        error: Class of the last failure.
        message: What it said.
    """

    origin: str
    failures: int
    error: str
    message: str


@dataclass(slots=True, kw_only=True, eq=False)
class Arrival:
    """One shard on its way.

    Attributes:
        source: The shard.
        done_bytes: What of it has arrived.
        failures: Requests for it that failed.
        last: The last failure.
    """

    source: ShardSource
    done_bytes: int = 0
    failures: int = 0
    last: OriginError | None = None
    _troubles: dict[str, OriginTrouble] = field(repr=False)

    def arrived(self, size_bytes: int) -> None:
        """So many bytes more are here."""
        self.done_bytes += size_bytes

    def failed(self, error: OriginError) -> None:
        """A request failed, and is perhaps asked again."""
        self.failures += 1
        self.last = error
        if not error.retryable:
            return  # says something of the shard or of the client's rights, and nothing of the store
        origin = self.source.origin.origin_id
        before = self._troubles.get(origin)
        self._troubles[origin] = OriginTrouble(
            origin=masked_urls(origin),
            failures=1 + (before.failures if before is not None else 0),
            error=type(error).__name__,
            message=error.message,
        )

    def news(self) -> News:
        """How it stands."""
        stage = "bytes of the shard fetched"
        if self.last is not None:
            stage += f"; {self.failures} requests failed, the last: {self.last.message}"
        return News(stage=stage, done=self.done_bytes, total=self.source.info.size_bytes)


class Arrivals:
    """All shards on their way."""

    def __init__(self) -> None:
        self._arrivals: dict[bytes, list[Arrival]] = {}
        self._troubles: dict[str, OriginTrouble] = {}

    @contextmanager
    def watch(self, source: ShardSource) -> Iterator[Arrival]:
        """A shard is on its way while inside, and here if nothing is raised."""
        arrival = Arrival(source=source, _troubles=self._troubles)
        self._arrivals.setdefault(source.key, []).append(arrival)
        try:
            yield arrival
        finally:
            arrivals = self._arrivals[source.key]
            arrivals.remove(arrival)
            if not arrivals:
                del self._arrivals[source.key]
        self._troubles.pop(source.origin.origin_id, None)

    def news(self, key: bytes) -> News | None:
        """How the shard ``key`` stands, ``None`` if it is not on its way."""
        arrivals = self._arrivals.get(key)
        return arrivals[-1].news() if arrivals else None

    def troubles(self) -> tuple[OriginTrouble, ...]:
        """Stores that have failed since they last delivered a shard."""
        return tuple(self._troubles.values())
