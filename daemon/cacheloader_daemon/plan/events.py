"""What the planner is told. Every event is a fact that has happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRef:
    """A shard as the planner sees it.

    Attributes:
        key: 16 bytes, see ``cacheloader.keys.shard_key``.
        reserve_bytes: Upper bound of what it takes on disk with its index, in whole blocks.
    """

    key: bytes
    reserve_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A client opened a data set.

    Attributes:
        session: Its number.
        shards: In manifest order.
        owner: On whose account its shards are fetched and kept, "" for nobody's in particular.
    """

    session: int
    shards: Sequence[ShardRef]
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed:
    """The client is gone; its plan, waiting requests and leases end."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFollowed:
    """The session's coming accesses, replacing an earlier plan (arrays as in ``protocol.messages.FollowPlan``)."""

    session: int
    first_clock: NDArray[np.int64]
    stop_clock: NDArray[np.int64]
    shard: NDArray[np.int32]
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advanced:
    """The session has finished with every row before ``clock``."""

    session: int
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demanded:
    """The session waits for a shard (index in its data set); ``request`` names the wait."""

    session: int
    request: int
    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The session gave back one lease of a shard (index in its data set)."""

    session: int
    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFinished:
    """A shard is committed and takes ``used_bytes`` on disk (at most its reservation)."""

    key: bytes
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """A fetch ended without a blob, its reservation is free again.

    Attributes:
        key: The shard.
        disk: Whether the cache directory is at fault (full, read-only, broken) and not the origin: then the shard
            can still be served from memory.
    """

    key: bytes
    disk: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
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
