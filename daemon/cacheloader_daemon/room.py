"""How much of a disk the cache may take, with others on the same disk: floors of free space and of free inodes."""

from __future__ import annotations

import os

import msgspec

from cacheloader.errors import ConfigError

DEFAULT_SHARE = 0.75
"""Part of what is free that the cache may take if nobody says: the job writes checkpoints and logs there too."""


class Floors(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache leaves free for others.

    Attributes:
        min_free_bytes: Bytes of each disk.
        min_free_share: Part of each disk, and of its inodes; the larger of both counts.
    """

    min_free_bytes: int = 0
    min_free_share: float = 0.0

    def __post_init__(self) -> None:
        if self.min_free_bytes < 0 or not 0 <= self.min_free_share < 1:
            raise ConfigError(
                f"min_free_size={self.min_free_bytes} and min_free_share={self.min_free_share} are no bytes and no "
                "part of a disk; pass numbers from 0, the share below 1"
            )


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """A file system at one moment.

    Attributes:
        device: Its number.
        spare_bytes: What is free above the floor; negative if others have taken of the floor.
        has_inodes: Whether as many inodes are free as shall be.
    """

    device: int
    spare_bytes: int
    has_inodes: bool


def look_at_disk(fd: int, floors: Floors) -> Disk:
    """The file system of an open directory.

    Raises:
        OSError: It does not answer.
    """
    found = os.fstatvfs(fd)
    floor_bytes = max(floors.min_free_bytes, int(floors.min_free_share * found.f_blocks * found.f_frsize))
    # File systems that make inodes as they need them say that they have none at all.
    floor_inodes = int(floors.min_free_share * found.f_files)
    return Disk(
        device=os.fstat(fd).st_dev,
        spare_bytes=found.f_bavail * found.f_frsize - floor_bytes,
        has_inodes=found.f_files == 0 or found.f_favail > floor_inodes,
    )


def shares(cache_bytes: int | None, room_bytes: list[int]) -> list[int]:
    """What each of several directories may hold.

    Args:
        cache_bytes: Of all together; ``None`` for ``DEFAULT_SHARE`` of what they have room for.
        room_bytes: Room of each: what is free, and what the cache holds there already.
    """
    total = sum(room_bytes)
    if cache_bytes is None:
        return [int(DEFAULT_SHARE * room) for room in room_bytes]
    if total <= 0:
        return [cache_bytes // len(room_bytes)] * len(room_bytes)
    shared = [cache_bytes * room // total for room in room_bytes]
    shared[0] += cache_bytes - sum(shared)
    return shared
