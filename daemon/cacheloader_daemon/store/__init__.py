"""Blobs on the local disk: published at once or not at all, found again by their names, opened only by us."""

from cacheloader_daemon.store.incoming import Incoming
from cacheloader_daemon.store.records import LeasedFiles, Resident, StoreStatistics
from cacheloader_daemon.store.space import reserve_bytes
from cacheloader_daemon.store.store import Store
from cacheloader_daemon.store.trouble import BlobLost, DiskTrouble, disk_trouble

__all__ = [
    "BlobLost",
    "DiskTrouble",
    "Incoming",
    "LeasedFiles",
    "Resident",
    "Store",
    "StoreStatistics",
    "disk_trouble",
    "reserve_bytes",
]
