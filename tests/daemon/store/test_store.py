from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING

import google_crc32c
import pytest
from cacheloader_daemon.store import DiskTrouble, Store, reserve_bytes
from cacheloader_daemon.store.manifests import MAX_MANIFESTS
from cacheloader_daemon.store.space import index_bound_bytes
from cacheloader_daemon.store.store import HEADROOM_BYTES

from tests.daemon.store.disks import add, content, du_bytes, key, read
from tests.support.descriptors import open_files, opened_since

if TYPE_CHECKING:
    from pathlib import Path


def files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_a_committed_shard_is_read_back_with_its_index(store: Store) -> None:
    used_bytes = add(store, 1)
    assert read(store, 1) == (content(1), b"index of 1")
    assert [(blob.key, blob.size_bytes, blob.used_bytes) for blob in store.resident()] == [
        (key(1), 100_000, used_bytes)
    ]


def test_parts_written_by_many_threads_in_any_order_make_the_shard(store: Store) -> None:
    data = os.urandom(1_000_003)
    incoming = store.begin(key(1), size_bytes=len(data))
    starts = list(range(0, len(data), 10_007))
    threads = [
        threading.Thread(
            target=lambda part: [incoming.write_at(start, data[start : start + 10_007]) for start in part],
            args=(starts[turn::4],),
        )
        for turn in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    incoming.commit(b"", google_crc32c.value(data))
    assert read(store, 1) == (data, b"")


def test_an_empty_shard_is_a_shard(store: Store) -> None:
    add(store, 1, size_bytes=0)
    assert read(store, 1) == (b"", b"index of 1")


def test_a_download_is_invisible_until_it_is_committed(store: Store) -> None:
    incoming = store.begin(key(1), size_bytes=4)
    incoming.write_at(0, b"data")
    with pytest.raises(KeyError):
        store.lease(key(1))
    assert os.pread(incoming.fd, 4, 0) == b"data"
    incoming.abort()
    incoming.abort()
    assert store.resident() == []


def test_an_aborted_download_leaves_nothing(store: Store, directory: Path) -> None:
    before = files_below(directory)
    incoming = store.begin(key(1), size_bytes=10_000)
    incoming.write_at(0, b"x" * 10_000)
    assert len(files_below(directory)) == len(before) + 1
    incoming.abort()
    assert files_below(directory) == before


def test_a_write_that_is_under_way_when_the_download_is_aborted_does_not_meet_a_strange_descriptor(
    store: Store,
) -> None:
    """1. Writers run. 2. Abort. 3. Files opened afterwards keep their bytes, and writers are told that it is over."""
    incoming = store.begin(key(1), size_bytes=2**20)
    started = threading.Barrier(5)
    told = []

    def write() -> None:
        started.wait(timeout=60)
        try:
            while True:
                incoming.write_at(0, b"w" * 2**20)
        except ValueError as error:
            told.append(str(error))

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    started.wait(timeout=60)
    incoming.abort()
    others = [os.memfd_create("other") for _ in range(20)]
    for writer in writers:
        writer.join(timeout=60)
    assert len(told) == 4
    assert all(os.fstat(other).st_size == 0 for other in others)
    for other in others:
        os.close(other)


def test_a_shard_with_a_hole_is_not_committed(store: Store) -> None:
    incoming = store.begin(key(1), size_bytes=10)
    incoming.write_at(0, b"12345")
    with pytest.raises(ValueError, match="5 of 10 bytes are written"):
        incoming.commit(b"", 0)
    incoming.write_at(5, b"67890")
    incoming.commit(b"", google_crc32c.value(b"1234567890"))
    assert read(store, 1)[0] == b"1234567890"


def test_bytes_outside_the_shard_are_refused(store: Store) -> None:
    incoming = store.begin(key(1), size_bytes=10)
    for offset, data in ((8, b"abc"), (-1, b"a")):
        with pytest.raises(ValueError, match="of a shard of 10 bytes"):
            incoming.write_at(offset, data)
    incoming.abort()


def test_modes_let_nobody_else_in_and_nobody_change_a_blob(store: Store, directory: Path) -> None:
    add(store, 1)
    store.put_manifest("0" * 32, b"manifest")
    for folder in (directory, directory / "blobs", directory / "blobs" / key(1)[:1].hex(), directory / "lmdb"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in files_below(directory):
        expected = 0o440 if path.parent.name not in {"lmdb", directory.name} else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_leases_are_read_only_descriptors_that_are_not_inherited(store: Store) -> None:
    add(store, 1)
    leased = store.lease(key(1))
    for fd in (leased.data_fd, leased.index_fd):
        assert not os.get_inheritable(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        os.close(fd)


def test_each_lease_has_an_offset_of_its_own(store: Store) -> None:
    add(store, 1)
    one, two = store.lease(key(1)), store.lease(key(1))
    os.lseek(one.data_fd, 50, os.SEEK_SET)
    assert os.lseek(two.data_fd, 0, os.SEEK_CUR) == 0
    for leased in (one, two):
        os.close(leased.data_fd)
        os.close(leased.index_fd)


def test_eviction_does_not_disturb_a_reader(store: Store, directory: Path) -> None:
    """1. Leased. 2. Evicted, and the same shard fetched again. 3. The reader sees the old file's bytes."""
    used_bytes = add(store, 1)
    leased = store.lease(key(1))
    assert store.evict(key(1)) == used_bytes
    with pytest.raises(KeyError):
        store.lease(key(1))
    assert list((directory / "blobs").rglob("*.data")) == []
    add(store, 1)
    assert os.pread(leased.data_fd, leased.size_bytes, 0) == content(1)
    assert os.fstat(leased.data_fd).st_nlink == 0
    os.close(leased.data_fd)
    os.close(leased.index_fd)


def test_evicting_what_is_not_there_frees_nothing(store: Store) -> None:
    assert store.evict(key(1)) == 0
    add(store, 1)
    assert store.evict(key(1)) > 0
    assert store.evict(key(1)) == 0
    assert store.statistics().evicted == 1


def test_quota_numbers_are_those_of_du(store: Store, directory: Path) -> None:
    for number, size_bytes in enumerate((0, 1, 4095, 4096, 4097, 1_000_000, 3_333_333)):
        add(store, number, size_bytes=size_bytes, index=b"i" * (size_bytes // 100))
    store.put_manifest("a" * 32, b"m" * 10_000)
    store.evict(key(3))
    (directory / "daemon.log").write_bytes(b"log" * 5000)
    (directory / "blobs" / "not ours").write_bytes(b"x" * 9000)
    store.close()
    reopened = Store.open(directory)
    try:
        used_bytes = sum(blob.used_bytes for blob in reopened.resident())
        assert used_bytes == reopened.statistics().used_bytes
        assert used_bytes + reopened.overhead_bytes() - HEADROOM_BYTES == du_bytes(directory)
    finally:
        reopened.close()


def test_growth_of_the_index_stays_within_the_headroom_between_two_measurements(store: Store, directory: Path) -> None:
    for number in range(600):
        store.remember_samples(key(number), number)
    overhead_bytes = store.overhead_bytes()
    for number in range(600, 1200):
        store.remember_samples(key(number), number)
    store.touch([key(number) for number in range(3)])
    store.sync()
    assert du_bytes(directory) <= overhead_bytes


@pytest.mark.parametrize("size_bytes", [0, 1, 511, 4096, 65_537, 1_000_000, 20_000_000])
def test_a_blob_with_the_largest_index_takes_at_most_its_reservation(store: Store, size_bytes: int) -> None:
    index = b"i" * index_bound_bytes(size_bytes)
    used_bytes = add(store, 1, size_bytes=size_bytes, index=index)
    assert size_bytes + len(index) <= used_bytes + 4096
    assert used_bytes <= store.reserve_bytes(size_bytes)
    assert store.reserve_bytes(size_bytes) >= reserve_bytes(size_bytes)


def test_an_index_beyond_its_bound_is_refused_with_the_numbers_and_leaves_nothing(
    store: Store, directory: Path
) -> None:
    before = files_below(directory)
    incoming = store.begin(key(1), size_bytes=1000)
    incoming.write_at(0, b"x" * 1000)
    with pytest.raises(DiskTrouble, match=r"index takes 65662 bytes; 65661 are reserved .* a shard of 1000 bytes"):
        incoming.commit(b"i" * 65_662, 0)
    assert files_below(directory) == before


def test_order_of_use_outlives_a_restart(store: Store, directory: Path) -> None:
    for number in range(4):
        add(store, number)
    read(store, 1)
    store.touch([key(0)])
    expected = [key(2), key(3), key(1), key(0)]
    assert [blob.key for blob in store.resident()] == expected
    store.close()
    reopened = Store.open(directory)
    assert [blob.key for blob in reopened.resident()] == expected
    reopened.close()


def test_a_clock_that_goes_back_does_not_turn_the_order_of_use_round(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, 1)
    monkeypatch.setattr("time.time_ns", lambda: 5)
    add(store, 2)
    assert [blob.key for blob in store.resident()] == [key(1), key(2)]


def test_sample_counts_outlive_eviction_and_restart(store: Store, directory: Path) -> None:
    add(store, 1)
    store.remember_samples(key(1), 1000)
    store.evict(key(1))
    store.close()
    reopened = Store.open(directory)
    assert reopened.samples(key(1)) == 1000
    assert reopened.samples(key(2)) is None
    reopened.close()


def test_manifests_come_back_and_the_ones_used_longest_ago_give_way(store: Store, directory: Path) -> None:
    digests = [f"{number:032x}" for number in range(MAX_MANIFESTS + 3)]
    for number, digest in enumerate(digests[:MAX_MANIFESTS]):
        store.put_manifest(digest, b"manifest %d" % number)
        # A disk may give all that come within some milliseconds one time.
        os.utime(directory / "manifests" / digest, (number, number))
    fd = store.open_manifest(digests[0])
    assert fd is not None
    assert os.read(fd, 100) == b"manifest 0"
    os.close(fd)
    for digest in digests[MAX_MANIFESTS:]:
        store.put_manifest(digest, memoryview(b"newer"))
    there = [fd for digest in digests if (fd := store.open_manifest(digest)) is not None]
    for fd in there:
        os.close(fd)
    assert len(there) == MAX_MANIFESTS
    still = store.open_manifest(digests[0])
    assert still is not None
    os.close(still)
    assert store.open_manifest(digests[1]) is None


@pytest.mark.parametrize("digest", ["", "../state", "A" * 32, "0" * 31])
def test_what_is_no_digest_opens_no_file(store: Store, digest: str) -> None:
    assert store.open_manifest(digest) is None


def test_a_blob_that_somebody_removed_is_lost_and_can_be_fetched_again(store: Store, directory: Path) -> None:
    add(store, 1)
    next((directory / "blobs").rglob("*.data")).unlink()
    with pytest.raises(KeyError):
        store.lease(key(1))
    assert store.resident() == []
    assert store.statistics().lost == 1
    add(store, 1)
    assert read(store, 1)[0] == content(1)


def test_a_blob_of_another_length_than_its_name_says_is_lost(store: Store, directory: Path) -> None:
    add(store, 1)
    path = next((directory / "blobs").rglob("*.data"))
    path.chmod(0o600)
    os.truncate(path, 50_000)
    with pytest.raises(KeyError):
        store.lease(key(1))
    assert not path.exists()


def test_other_bytes_under_one_version_replace_the_blob_and_its_reader_keeps_the_old_ones(store: Store) -> None:
    add(store, 1)
    leased = store.lease(key(1))
    other = b"\xff" * 100_000
    incoming = store.begin(key(1), size_bytes=len(other))
    incoming.write_at(0, other)
    incoming.commit(b"index of 1", google_crc32c.value(other))
    assert read(store, 1)[0] == other
    assert os.pread(leased.data_fd, 100_000, 0) == content(1)
    assert len(store.resident()) == 1
    os.close(leased.data_fd)
    os.close(leased.index_fd)


def test_closing_twice_does_nothing_and_leaves_no_descriptor(directory: Path) -> None:
    def files() -> list[str]:
        """Without connections, which come and go with what earlier tests have left."""
        return [target for target in opened_since(before) if target.startswith("/")]

    before = open_files()
    store = Store.open(directory)
    add(store, 1)
    assert files()
    store.close()
    store.close()
    assert files() == []
