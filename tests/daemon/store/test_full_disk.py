"""A full, read-only or small disk: trouble by name, nothing left behind, and what is there is still served."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import TYPE_CHECKING

import google_crc32c
import pytest
from cacheloader_daemon.store import DiskTrouble, Store

from cacheloader.errors import CacheUnusable
from tests.daemon.store.disks import add, content, du_bytes, fill, key, mounted, read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=16m"):
        yield tmp_path / "disk"


def test_a_shard_that_does_not_fit_is_known_before_its_first_byte_and_leaves_nothing(disk: Path) -> None:
    store = Store.open(disk / "cache")
    add(store, 1, size_bytes=8 * MIB)
    before = du_bytes(disk)
    with pytest.raises(DiskTrouble) as caught:
        store.begin(key(2), size_bytes=12 * MIB)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename is not None
    assert du_bytes(disk) == before
    assert read(store, 1)[0] == content(1, 8 * MIB)
    assert store.evict(key(1)) >= 8 * MIB
    add(store, 2, size_bytes=12 * MIB)
    store.close()


def test_space_that_was_allocated_is_there_when_the_disk_fills_up_meanwhile(disk: Path) -> None:
    store = Store.open(disk / "cache")
    incoming = store.begin(key(1), size_bytes=4 * MIB)
    fill(disk)
    incoming.write_at(0, content(1, 4 * MIB))
    (disk / "filler").unlink()
    incoming.commit(b"", google_crc32c.value(content(1, 4 * MIB)))
    store.close()


def test_a_full_disk_at_the_moment_of_publishing_undoes_the_download(disk: Path) -> None:
    store = Store.open(disk / "cache")
    add(store, 1, size_bytes=MIB)
    incoming = store.begin(key(2), size_bytes=MIB)
    incoming.write_at(0, content(2, MIB))
    fill(disk)
    with pytest.raises(DiskTrouble) as caught:
        incoming.commit(b"i" * 5000, google_crc32c.value(content(2, MIB)))
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in (disk / "cache" / "blobs" / key(2)[:1].hex()).iterdir()] == []
    assert [blob.key for blob in store.resident()] == [key(1)]
    assert read(store, 1)[0] == content(1, MIB)
    (disk / "filler").unlink()
    add(store, 2, size_bytes=MIB)
    assert read(store, 2)[0] == content(2, MIB)
    store.close()


def test_an_index_that_the_disk_does_not_take_undoes_no_download(disk: Path) -> None:
    """Fault: ENOSPC at the commit of LMDB. Promise: the blob is there, now and after the next start."""
    store = Store.open(disk / "cache")
    incoming = store.begin(key(2), size_bytes=MIB)
    incoming.write_at(0, content(2, MIB))
    fill(disk)
    incoming.commit(b"", google_crc32c.value(content(2, MIB)))
    store.touch([key(2)])
    store._flushing.write_rows()
    assert store._residents.num_changed == 1, "the index did not take it, and it is tried again"
    assert read(store, 2)[0] == content(2, MIB)
    store.close()
    reopened = Store.open(disk / "cache")
    assert read(reopened, 2)[0] == content(2, MIB)
    reopened.close()


def test_on_a_full_disk_blobs_can_still_be_evicted_and_counts_are_forgotten_without_an_error(disk: Path) -> None:
    store = Store.open(disk / "cache")
    for number in range(3):
        add(store, number, size_bytes=MIB)
    fill(disk)
    for number in range(2000):
        store.remember_samples(key(number), number)
    store.touch([key(1)])
    for number in range(3):
        assert store.evict(key(number)) >= MIB
    assert store.statistics().blobs == 0
    store.close()
    (disk / "filler").unlink()
    reopened = Store.open(disk / "cache")
    assert reopened.resident() == []
    reopened.close()


def test_a_cache_on_a_full_disk_can_be_opened_again(disk: Path) -> None:
    store = Store.open(disk / "cache")
    add(store, 1, size_bytes=MIB)
    store.close()
    fill(disk)
    reopened = Store.open(disk / "cache")
    assert read(reopened, 1)[0] == content(1, MIB)
    reopened.close()


def test_a_new_cache_on_a_full_disk_is_refused_with_the_way_out(disk: Path) -> None:
    fill(disk)
    with pytest.raises(CacheUnusable, match=r"No space left on device; .*local disk"):
        Store.open(disk / "cache")


def test_a_disk_that_turned_read_only_is_refused_at_the_start(disk: Path) -> None:
    Store.open(disk / "cache").close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=30)
    try:
        with pytest.raises(CacheUnusable, match="Read-only file system"):
            Store.open(disk / "cache")
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True, timeout=30)


def test_a_folder_that_refuses_changes_still_serves_and_the_rest_is_trouble(directory: Path, store: Store) -> None:
    used_bytes = add(store, 1)
    incoming = store.begin(key(257), size_bytes=4)
    incoming.write_at(0, b"data")
    folder = directory / "blobs" / key(1)[:1].hex()
    if subprocess.run(["chattr", "+i", str(folder)], capture_output=True, check=False, timeout=30).returncode:
        pytest.skip("files cannot be made immutable here")
    try:
        with pytest.raises(DiskTrouble):
            store.begin(key(1), size_bytes=10)
        with pytest.raises(DiskTrouble):
            incoming.commit(b"", 0)
        assert read(store, 1)[0] == content(1)
        assert store.statistics().used_bytes == used_bytes
        with pytest.raises(DiskTrouble):
            store.evict(key(1))
        assert key(1) not in store
        assert store.leftover_bytes == used_bytes, "what cannot be unlinked still counts"
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True, timeout=30)
    store.close()
    reopened = Store.open(directory)
    assert read(reopened, 1)[0] == content(1)
    reopened.close()


def test_a_folder_that_cannot_be_opened_is_trouble_and_no_crash(disk: Path) -> None:
    store = Store.open(disk / "cache")
    add(store, 1, size_bytes=MIB)
    (disk / "cache" / "blobs" / "02").write_bytes(b"in the way")
    with pytest.raises(DiskTrouble) as caught:
        store.begin(key(2), size_bytes=10)
    assert caught.value.errno == errno.ENOTDIR
    store.close()


def test_what_is_mounted_over_the_directory_later_gets_no_files(disk: Path) -> None:
    """1. Open. 2. Another disk is mounted over the path. 3. Blobs still go to, and come from, the first."""
    store = Store.open(disk / "cache")
    add(store, 1)
    with mounted(disk / "cache", "size=1m"):
        add(store, 2)
        assert read(store, 1)[0] == content(1)
        assert os.listdir(disk / "cache") == []
    assert read(store, 2)[0] == content(2)
    store.close()
