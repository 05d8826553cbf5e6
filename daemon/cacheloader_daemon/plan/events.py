"""What the planner is told. Every event is a fact that has happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class ShardRef(msgspec.Struct, frozen=True, kw_only=True):
    """A shard as the planner sees it.

    Attributes:
        key: 16 bytes, see ``cacheloader.keys.shard_key``.
        reserve_bytes: Upper bound of what it takes on disk with its index, in whole blocks.
    """

    key: bytes
    reserve_bytes: int


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True):
    """A client opened a data set.

    Attributes:
        session: Its number.
        shards: In manifest order.
        owner: On whose account its shards are fetched and kept, "" for nobody's in particular.
    """

    session: int
    shards: Sequence[ShardRef]
    owner: str = ""


class SessionClosed(msgspec.Struct, frozen=True, kw_only=True):
    """The client is gone; its plan, waiting requests and leases end."""

    session: int


class PlanFollowed(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The session's coming accesses, replacing an earlier plan (arrays as in ``protocol.messages.FollowPlan``)."""

    session: int
    first_clock: NDArray[np.int64]
    stop_clock: NDArray[np.int64]
    shard: NDArray[np.int32]
    clock: int


class Advanced(msgspec.Struct, frozen=True, kw_only=True):
    """The session has finished with every row before ``clock``."""

    session: int
    clock: int


class Demanded(msgspec.Struct, frozen=True, kw_only=True):
    """The session waits for a shard (index in its data set); ``request`` names the wait."""

    session: int
    request: int
    shard: int


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """The session gave back one lease of a shard (index in its data set)."""

    session: int
    shard: int


class FetchFinished(msgspec.Struct, frozen=True, kw_only=True):
    """A shard is committed and takes ``used_bytes`` on disk (at most its reservation)."""

    key: bytes
    used_bytes: int


class FetchFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A fetch ended without a blob, its reservation is free again.

    Attributes:
        key: The shard.
        disk: Whether the cache directory is at fault (full, read-only, broken) and not the origin: then the shard
            can still be served from memory.
    """

    key: bytes
    disk: bool


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A blob's file is gone from the directory (after ``Evict``, or lost for another reason)."""

    key: bytes


Event = (
    SessionOpened
    | SessionClosed
    | PlanFollowed
    | Advanced
    | Demanded
    | Released
    | FetchFinished
    | FetchFailed
    | Dropped
)
