"""Who holds the quota's bytes. Nothing is booked that does not fit."""

from __future__ import annotations


class Ledger:
    """Bytes by purpose. Resident, reserved, evicting, unlinked and overhead bytes together stay within the quota.

    Only what is found on disk may exceed it: blobs of an earlier start or hour under a larger quota, and overhead that
    grew.
    Nothing is reserved then until enough has been evicted.

    Args:
        quota_bytes: The bound.
        overhead_bytes: What the cache directory holds besides blobs.
    """

    __slots__ = (
        "_found_excess_bytes",
        "evicting_bytes",
        "overhead_bytes",
        "quota_bytes",
        "reserved_bytes",
        "resident_bytes",
        "unlinked_bytes",
    )

    def __init__(self, *, quota_bytes: int, overhead_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.overhead_bytes = overhead_bytes
        self.resident_bytes = 0
        self.reserved_bytes = 0
        self.evicting_bytes = 0
        self.unlinked_bytes = 0
        self._found_excess_bytes = max(0, overhead_bytes - quota_bytes)

    @property
    def total_bytes(self) -> int:
        """Everything that is on disk or may get there."""
        return (
            self.resident_bytes + self.reserved_bytes + self.evicting_bytes + self.unlinked_bytes + self.overhead_bytes
        )

    @property
    def free_bytes(self) -> int:
        """What may be reserved; negative while more was found than the quota allows."""
        return self.quota_bytes - self.total_bytes

    @property
    def capacity_bytes(self) -> int:
        """What shards could take if there was no other shard."""
        return self.quota_bytes - self.overhead_bytes

    def found(self, used_bytes: int) -> None:
        """A blob of an earlier start."""
        self.resident_bytes += used_bytes
        self._found_excess_bytes = max(0, -self.free_bytes)

    def set_overhead(self, overhead_bytes: int) -> None:
        """What the cache directory holds besides blobs, measured again."""
        self.overhead_bytes = overhead_bytes
        self._found_excess_bytes = max(0, -self.free_bytes)

    def set_quota(self, quota_bytes: int) -> None:
        """The bound, as it is from now on; what is there already may exceed it."""
        self.quota_bytes = quota_bytes
        self._found_excess_bytes = max(0, -self.free_bytes)

    def reserve(self, reserve_bytes: int) -> None:
        """Set space aside for a download."""
        assert reserve_bytes <= self.free_bytes, f"{reserve_bytes} bytes do not fit into {self.free_bytes} free bytes"
        self.reserved_bytes += reserve_bytes

    def cancel(self, reserve_bytes: int) -> None:
        """The download ended without a blob."""
        self.reserved_bytes -= reserve_bytes

    def commit(self, reserve_bytes: int, used_bytes: int) -> None:
        """The download is a blob now, at most as large as its reservation."""
        assert used_bytes <= reserve_bytes, f"a blob of {used_bytes} bytes exceeds its reservation of {reserve_bytes}"
        self.reserved_bytes -= reserve_bytes
        self.resident_bytes += used_bytes

    def evict(self, used_bytes: int) -> None:
        """A blob is to be unlinked; its bytes are there until that is done."""
        self.resident_bytes -= used_bytes
        self.evicting_bytes += used_bytes

    def evicted(self, used_bytes: int) -> None:
        """A blob chosen as victim is gone."""
        self.evicting_bytes -= used_bytes

    def lost(self, used_bytes: int) -> None:
        """A blob is gone that was not chosen, and nobody has it open."""
        self.resident_bytes -= used_bytes

    def lost_while_leased(self, used_bytes: int) -> None:
        """A blob's file is gone, and leases keep its bytes on disk."""
        self.resident_bytes -= used_bytes
        self.unlinked_bytes += used_bytes

    def closed(self, used_bytes: int) -> None:
        """The last lease of a blob without a file has ended."""
        self.unlinked_bytes -= used_bytes

    def check(self) -> None:
        """Assert that no number is negative and that the quota is kept."""
        # An excess may only shrink: space that was won back is not given away again.
        self._found_excess_bytes = min(self._found_excess_bytes, max(0, -self.free_bytes))
        for name in ("resident_bytes", "reserved_bytes", "evicting_bytes", "unlinked_bytes"):
            assert getattr(self, name) >= 0, f"{name} is {getattr(self, name)}"
        assert self.free_bytes >= -self._found_excess_bytes, (
            f"{self.total_bytes} bytes are booked under a quota of {self.quota_bytes}"
        )
