"""What a data set asks of whoever brings its shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from cacheloader.manifest.record import Manifest
    from cacheloader.protocol.messages import DatasetSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AccessPlan:
    """The shards that a session will read, in the order of their first use.

    Attributes:
        first_clock: int64 [n], sorted; the row, counted over all epochs, that first needs the shard.
        stop_clock: int64 [n]; one past the last row that needs it in this access.
        shard: int32 [n]; index in the manifest. A shard may appear again in a later epoch.
        clock: Where the session stands.
    """

    first_clock: NDArray[np.int64]
    stop_clock: NDArray[np.int64]
    shard: NDArray[np.int32]
    clock: int


class Lease(Protocol):
    """The right to read one shard. Its bytes stay readable until it is released, whatever happens to the cache."""

    @property
    def size_bytes(self) -> int:
        """Length of the shard."""
        ...

    @property
    def index(self) -> bytes:
        """The format's sample index."""
        ...

    @property
    def source(self) -> str:
        """``"nvme"``, ``"origin"`` or ``"memory"``."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Exactly the bytes ``[start, stop)`` of the shard."""
        ...

    def read_each(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        """``read`` of many ranges."""
        ...

    def release(self) -> None:
        """Give the shard back; calling it again does nothing."""
        ...


class Transport(Protocol):
    """A session: one data set, read by one process. Not thread safe; never shared between processes."""

    def open_dataset(
        self, spec: DatasetSpec, *, digest: str = "", progress: Callable[[str, int, int], None] | None = None
    ) -> Manifest:
        """Resolve ``spec``.

        Args:
            spec: What to read.
            digest: The manifest expected, "" at the first opening.
            progress: Called with (stage, done, total) while the daemon works.

        Raises:
            OriginError, DatasetError, ConfigError: As the origin or the daemon found.
            StateMismatch: ``digest`` was given and the data set has another one now.
        """
        ...

    def follow(self, plan: AccessPlan) -> None:
        """Announce the coming accesses, replacing an earlier plan."""
        ...

    def advance(self, clock: int) -> None:
        """Say that every row before ``clock`` is done; never waits."""
        ...

    def acquire(self, shard: int) -> Lease:
        """A lease of shard number ``shard`` of the open data set, waiting for it if need be.

        Raises:
            DeadlineExceeded: It did not come in time; names the shard, the source and the last cause.
        """
        ...

    def close(self) -> None:
        """End the session and all its leases; calling it again does nothing."""
        ...
