"""The fetcher and a disk that gives nothing back."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
from cacheloader_daemon.disk import DiskThreads
from cacheloader_daemon.fetch import Fetcher
from cacheloader_daemon.store import DiskTrouble, LeasedFiles

from tests.support.descriptors import open_files, opened_since
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


class UnreadableIndex:
    """A store whose index can be opened, and fails when it is read, as a file on a broken disk does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.threads: list[str] = []

    def is_slow(self, key: bytes) -> bool:
        return key == b"s" * 16

    def lease(self, key: bytes) -> LeasedFiles:
        self.threads.append(threading.current_thread().name)
        # Reading a directory is refused with an errno, which is all that a broken sector would do.
        data_fd, index_fd = (os.open(self._folder, os.O_RDONLY) for _ in range(2))
        return LeasedFiles(data_fd=data_fd, index_fd=index_fd, size_bytes=10, index_bytes=8)


async def test_an_index_that_cannot_be_read_is_trouble_of_the_disk_and_leaves_nothing_open(tmp_path: Path) -> None:
    quick = DiskThreads(1, name="quick")
    unused = cast("Any", None)
    store = cast("Any", UnreadableIndex(tmp_path))
    fetcher = Fetcher(store=store, preparers=unused, slots=unused, limits=unused, quick=quick, bulk=quick)
    before = open_files()
    with pytest.raises(DiskTrouble, match="reading an index"):
        await fetcher.lease(b"k" * 16, source="nvme")
    await until(lambda: not opened_since(before))
    quick.close()


async def test_a_blob_that_has_to_be_verified_keeps_no_other_from_being_opened(tmp_path: Path) -> None:
    quick, bulk = DiskThreads(1, name="quick"), DiskThreads(1, name="bulk")
    unused, store = cast("Any", None), UnreadableIndex(tmp_path)
    fetcher = Fetcher(store=cast("Any", store), preparers=unused, slots=unused, limits=unused, quick=quick, bulk=bulk)
    for key in (b"s" * 16, b"k" * 16):
        with pytest.raises(DiskTrouble):
            await fetcher.lease(key, source="nvme")
    assert store.threads == ["bulk-1", "quick-1"]
    quick.close()
    bulk.close()
