"""How the cache's bytes are shared out among owners: what each is guaranteed, and what he may borrow of the others.

A shard counts for the owner for whom it was fetched, also while others use it, until it is evicted. Space that an owner
leaves of his guarantee is everybody's to borrow. An owner who is below his guarantee takes it back at once, whenever
the borrower would have needed his shards; nobody but himself takes shards of an owner who is not above it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NOBODY = ""
"""Owner of blobs of an earlier start, and of sessions that name none."""


class ShareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What owners may hold.

    Attributes:
        guaranteed_bytes: By owner, what others cannot take from him.
        max_bytes: By owner, the most that he may hold; who is not named may hold all that others leave.
    """

    guaranteed_bytes: Mapping[str, int] = msgspec.field(default_factory=dict)
    max_bytes: Mapping[str, int] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for owner, most_bytes in self.max_bytes.items():
            if most_bytes < self.guaranteed_bytes.get(owner, 0):
                raise ConfigError(f"owner {owner!r} may hold {most_bytes} bytes and is guaranteed more")

    def __bool__(self) -> bool:
        return bool(self.guaranteed_bytes or self.max_bytes)


class Shares:
    """Who holds how much.

    Args:
        options: What they may.
    """

    def __init__(self, options: ShareOptions) -> None:
        self.is_shared = bool(options)
        self._options = options
        self._held: Counter[str] = Counter()

    def held_bytes(self, owner: str) -> int:
        """Reservations and blobs that count for ``owner``; what is being evicted no longer does."""
        return self._held[owner]

    def take(self, owner: str, size_bytes: int) -> None:
        """More counts for ``owner``; less, if it is negative."""
        self._held[owner] += size_bytes

    def is_entitled(self, owner: str, need_bytes: int) -> bool:
        """Whether so much more is still within what ``owner`` is guaranteed."""
        return self._held[owner] + need_bytes <= self._options.guaranteed_bytes.get(owner, 0)

    def excess_bytes(self, owner: str, need_bytes: int) -> int:
        """How much of his own ``owner`` has to give up before he may hold so much more; 0 or less for nothing."""
        most_bytes = self._options.max_bytes.get(owner)
        return 0 if most_bytes is None else self._held[owner] + need_bytes - most_bytes

    def most_bytes(self, owner: str, capacity_bytes: int) -> int:
        """The most that ``owner`` can ever hold of a cache of so many bytes."""
        others = sum(size for other, size in self._options.guaranteed_bytes.items() if other != owner)
        return min(self._options.max_bytes.get(owner, capacity_bytes), max(0, capacity_bytes - others))

    def may_lose(self, owner: str, size_bytes: int) -> bool:
        """Whether others may take so much from ``owner``."""
        return self._held[owner] - size_bytes >= self._options.guaranteed_bytes.get(owner, 0)

    def by_owner(self) -> dict[str, int]:
        """Bytes that count for each owner who holds any."""
        return {owner: size for owner, size in self._held.items() if size and owner != NOBODY}


class Claim:
    """From whom an owner may take blobs, and how many have been taken already.

    Args:
        shares: What all hold.
        owner: Who needs space.
        of: Owner and size of a blob.
        own: Whether his own blobs may go.
        others: Whether those of others may that are above what they are guaranteed.
        by_right: Whether they go also if others would have needed them sooner.
    """

    def __init__(
        self,
        shares: Shares,
        owner: str,
        of: Callable[[bytes], tuple[str, int]],
        *,
        own: bool = False,
        others: bool = False,
        by_right: bool = False,
    ) -> None:
        self.by_right = by_right
        self._shares = shares
        self._owner = owner
        self._of = of
        self._own = own
        self._others = others
        self._taken: Counter[str] = Counter()

    def allows(self, key: bytes) -> bool:
        """Whether a blob may go."""
        owner, size_bytes = self._of(key)
        if owner == self._owner:
            return self._own
        return self._others and self._shares.may_lose(owner, self._taken[owner] + size_bytes)

    def take(self, key: bytes) -> None:
        """It goes."""
        owner, size_bytes = self._of(key)
        self._taken[owner] += size_bytes
