"""The shards that one iteration holds at the moment: leased when first read, given back when their window is over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import cacheloader.formats.webdataset_reader  # noqa: F401  (the first shard, once it has come, does not wait for it)
from cacheloader.errors import CorruptShard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheloader.formats.base import ShardFormat, ShardReader
    from cacheloader.manifest.record import Manifest
    from cacheloader.transport.base import AccessPlan, Lease, Transport

_TELL_EVERY_S = 0.02
"""How often the daemon hears where the session stands; each message wakes it, and a batch may take a tenth of that."""


class Shelf:
    """Leases and readers of one session, along its plan.

    Args:
        transport: Where leases come from.
        manifest: The data set.
        plan: The accesses that were announced; tells when a shard is no longer needed.
        shard_format: How to read a shard.
        columns: Fields to read, all if ``None``.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        manifest: Manifest,
        plan: AccessPlan,
        shard_format: ShardFormat,
        columns: Sequence[str] | None,
    ) -> None:
        self._transport = transport
        self._manifest = manifest
        self._plan = plan
        self._format = shard_format
        self._columns = columns
        self._begun = 0  # accesses of the plan whose first row has been reached
        self._needed_until: dict[int, int] = {}  # shard -> stop_clock of its latest access that has begun
        self._held: dict[int, tuple[Lease, ShardReader]] = {}
        self._told_s = 0.0
        self._untold: int | None = None  # a clock that was not worth a message

    def reader(self, shard: int) -> ShardReader:
        """A reader of shard number ``shard``, waiting for it if need be."""
        held = self._held.get(shard)
        if held is None:
            if self._untold is not None:
                self._tell(self._untold)  # it may be what lets the daemon make room
            lease = self._transport.acquire(shard)
            try:
                reader = self._open(shard, lease)
            except BaseException:
                lease.release()
                raise
            held = self._held[shard] = (lease, reader)
        return held[1]

    def lease(self, shard: int) -> Lease:
        """The lease of a shard that has been asked for with ``reader``."""
        return self._held[shard][0]

    def keep(self, shard: int, until: int) -> None:
        """Hold a shard, once it is there, until no row before ``until`` is left, or longer if that was said before.

        Args:
            shard: Its number.
            until: A clock.
        """
        self._needed_until[shard] = max(until, self._needed_until.get(shard, 0))

    def holds(self, shard: int) -> bool:
        """Whether ``reader`` would not have to wait for this shard."""
        return shard in self._held

    def advance(self, clock: int) -> None:
        """Give back every shard that no row from ``clock`` on needs, and tell the daemon where the session stands."""
        plan = self._plan
        while self._begun < len(plan.shard) and plan.first_clock[self._begun] < clock:
            self.keep(int(plan.shard[self._begun]), int(plan.stop_clock[self._begun]))
            self._begun += 1
        over = [shard for shard, stop in self._needed_until.items() if stop <= clock]
        for shard in over:
            del self._needed_until[shard]
            if shard in self._held:
                self._held.pop(shard)[0].release()
        if over or time.monotonic() - self._told_s >= _TELL_EVERY_S:
            self._tell(clock)
        else:
            self._untold = clock

    def clear(self) -> None:
        """Give back everything."""
        for lease, _ in self._held.values():
            lease.release()
        self._held.clear()

    def _tell(self, clock: int) -> None:
        self._untold, self._told_s = None, time.monotonic()
        self._transport.advance(clock)

    def _open(self, shard: int, lease: Lease) -> ShardReader:
        uri = self._manifest.uri(shard)
        reader = self._format.open(lease, lease.index, uri=uri, columns=self._columns)
        expected = int(self._manifest.num_samples[shard])
        if reader.num_samples != expected:
            raise CorruptShard(
                f"{uri} holds {reader.num_samples} samples and the manifest says {expected}; "
                "correct or remove the sample counts beside the shards (shards.json), then start again",
                uri=uri,
            )
        return reader
