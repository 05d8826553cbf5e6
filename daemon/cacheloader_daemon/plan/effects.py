"""What the planner wants done. The runtime does it and reports the outcome as an event."""

from __future__ import annotations

import msgspec


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """Bring a shard into the store; space for its reservation is set aside. Ends in FetchFinished or FetchFailed.

    Attributes:
        key: The shard.
        demand: Whether somebody waits for it already.
    """

    key: bytes
    demand: bool


class Promote(msgspec.Struct, frozen=True, kw_only=True):
    """A prefetch in flight is now waited for: give its requests precedence."""

    key: bytes


class Evict(msgspec.Struct, frozen=True, kw_only=True):
    """Unlink a blob; it counts against the quota until ``Dropped`` is reported."""

    key: bytes


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Hand the waiting request a lease of a committed blob.

    Attributes:
        session: The session that waits.
        request: Its wait.
        key: The shard.
        hit: Whether the shard was there when it was asked for.
    """

    session: int
    request: int
    key: bytes
    hit: bool


class ServeFromMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Fetch the shard into memory for this request alone: the disk cannot take it. Not counted against the quota."""

    session: int
    request: int
    key: bytes


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """Tell the waiting request that the fetch failed; the runtime knows the last error of the key."""

    session: int
    request: int
    key: bytes


Effect = Fetch | Promote | Evict | Grant | ServeFromMemory | Refuse
