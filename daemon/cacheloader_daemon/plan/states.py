"""The states of a shard and the only moves between them; ``docs/states.md`` shows the same table to people."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class IllegalEvent(AssertionError):
    """An event that cannot have happened; the planner is as it was before. Ends with the key's recent story."""


class ShardState(Enum):
    """Where a shard stands. The planner keeps no record of an absent one."""

    ABSENT = "absent"
    WANTED = "wanted"
    FETCHING = "fetching"
    RESIDENT = "resident"
    EVICTING = "evicting"
    UNLINKED = "unlinked"


class Cause(Enum):
    """Why a shard moves."""

    DEMANDED = "demanded"
    WANTED_NO_MORE = "wanted no more"
    DEMAND_FETCH_STARTED = "demand fetch started"
    PREFETCH_STARTED = "prefetch started"
    FETCH_FINISHED = "fetch finished"
    FETCH_FAILED = "fetch failed"
    CHOSEN_AS_VICTIM = "chosen as victim"
    DROPPED = "dropped"
    DROPPED_WHILE_DEMANDED = "dropped while demanded"
    LOST = "lost"
    LOST_WHILE_LEASED = "lost while leased"
    LAST_LEASE_ENDED = "last lease ended"


MOVES: Mapping[tuple[ShardState, Cause], ShardState] = MappingProxyType(
    {
        (ShardState.ABSENT, Cause.DEMANDED): ShardState.WANTED,
        (ShardState.ABSENT, Cause.PREFETCH_STARTED): ShardState.FETCHING,
        (ShardState.WANTED, Cause.DEMAND_FETCH_STARTED): ShardState.FETCHING,
        (ShardState.WANTED, Cause.WANTED_NO_MORE): ShardState.ABSENT,
        (ShardState.FETCHING, Cause.FETCH_FINISHED): ShardState.RESIDENT,
        (ShardState.FETCHING, Cause.FETCH_FAILED): ShardState.ABSENT,
        (ShardState.RESIDENT, Cause.CHOSEN_AS_VICTIM): ShardState.EVICTING,
        (ShardState.RESIDENT, Cause.LOST): ShardState.ABSENT,
        (ShardState.RESIDENT, Cause.LOST_WHILE_LEASED): ShardState.UNLINKED,
        (ShardState.EVICTING, Cause.DROPPED): ShardState.ABSENT,
        (ShardState.EVICTING, Cause.DROPPED_WHILE_DEMANDED): ShardState.WANTED,
        (ShardState.UNLINKED, Cause.LAST_LEASE_ENDED): ShardState.ABSENT,
    }
)
