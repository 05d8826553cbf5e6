"""Blobs on the local disk: published at once or not at all, found again by their names, opened only by us."""

from cacheloader_daemon.room import Floors
from cacheloader_daemon.store.incoming import Incoming
from cacheloader_daemon.store.member import DirectoryStatus
from cacheloader_daemon.store.pool import Pool, Survey
from cacheloader_daemon.store.records import LeasedFiles, Resident, StoreStatistics
from cacheloader_daemon.store.scrub import Scrubber
from cacheloader_daemon.store.space import reserve_bytes
from cacheloader_daemon.store.store import Store
from cacheloader_daemon.store.trouble import BlobLost, DiskTrouble, disk_trouble

__all__ = [
    "BlobLost",
    "DirectoryStatus",
    "DiskTrouble",
    "Floors",
    "Incoming",
    "LeasedFiles",
    "Pool",
    "Resident",
    "Scrubber",
    "Store",
    "StoreStatistics",
    "Survey",
    "disk_trouble",
    "reserve_bytes",
]
