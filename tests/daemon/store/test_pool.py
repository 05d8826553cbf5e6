"""Several directories as one cache: each fault is one directory's, and the others go on."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING

import google_crc32c
import pytest
from cacheloader_daemon.config import DaemonConfig
from cacheloader_daemon.room import Floors
from cacheloader_daemon.storage import open_pool
from cacheloader_daemon.store import BlobLost, DiskTrouble, Pool, Store

from cacheloader.errors import CacheUnusable, ConfigError, DaemonUnavailable
from tests.daemon.store.disks import add, content, file_of, fill, flip_bit, key, mounted, read, refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 2**20


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Path]]:
    """Two small disks."""
    with ExitStack() as stack:
        paths = [tmp_path / "one", tmp_path / "two"]
        for path in paths:
            stack.enter_context(mounted(path, "size=16m"))
        yield paths


@pytest.fixture
def pools() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(directories: list[Path], *, cache_bytes: int | None = 24 * MIB, **options: object) -> Pool:
        made.append(Pool([Store.open(path) for path in directories], cache_bytes=cache_bytes, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def caches(disks: list[Path]) -> list[Path]:
    return [disk / "cache" for disk in disks]


def num_blobs(disk: Path) -> int:
    return len(list((disk / "cache" / "blobs").rglob("*.data")))


def conditions(pool: Pool) -> list[str]:
    return [one.condition for one in pool.status()]


def download(pool: Pool, number: int) -> None:
    """As the daemon does: one that fails is aborted."""
    incoming = pool.begin(key(number), size_bytes=1000)
    try:
        incoming.write_at(0, content(number, 1000))
        incoming.commit(b"index", google_crc32c.value(content(number, 1000)))
    finally:
        incoming.abort()


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True, timeout=30)


def test_shards_are_spread_by_what_is_left_of_each_share(disks: list[Path], pools: Callable[..., Pool]) -> None:
    pool = pools(caches(disks))
    assert [one.share_bytes for one in pool.status()] == [12 * MIB, 12 * MIB]
    for number in range(10):
        add(pool, number, size_bytes=MIB)
    assert [num_blobs(disk) for disk in disks] == [5, 5]
    assert all(read(pool, number)[0] == content(number, MIB) for number in range(10))
    assert pool.survey().limit_bytes == 24 * MIB


def test_a_larger_disk_gets_the_larger_share(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    with mounted(tmp_path / "one", "size=8m"), mounted(tmp_path / "two", "size=32m"):
        pool = pools(caches([tmp_path / "one", tmp_path / "two"]), cache_bytes=20 * MIB)
        small, large = (one.share_bytes for one in pool.status())
        assert 3.5 < large / small < 4.6
        assert small + large == 20 * MIB
        pool.close()


def test_without_a_size_the_pool_takes_three_quarters_of_every_disk(
    disks: list[Path], pools: Callable[..., Pool]
) -> None:
    pool = pools(caches(disks), cache_bytes=None)
    assert pool.quota_bytes == pytest.approx(0.75 * 32 * MIB, rel=0.2)


def test_directories_on_one_disk_share_its_room_and_are_warned_about(
    disks: list[Path], pools: Callable[..., Pool], caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: an NVMe that is not mounted. Promise: its directory does not count the other disk's space again."""
    pool = pools([disks[0] / "a", disks[0] / "b"], cache_bytes=None)
    assert pool.quota_bytes <= 0.8 * 16 * MIB
    assert "is one of them not mounted?" in caplog.text


def test_blobs_of_all_directories_come_back_in_the_order_of_use(disks: list[Path], pools: Callable[..., Pool]) -> None:
    pool = pools(caches(disks))
    for number in range(6):
        add(pool, number, size_bytes=MIB)
    read(pool, 0)
    pool.close()
    again = pools(caches(disks))
    assert [blob.key for blob in again.resident()] == [key(number) for number in (1, 2, 3, 4, 5, 0)]


def test_a_full_disk_is_passed_over_for_one_with_room(disks: list[Path], pools: Callable[..., Pool]) -> None:
    """Fault: others fill one disk (ENOSPC). Promise: shards go to the other one, and the quota shrinks."""
    pool = pools(caches(disks))
    fill(disks[0])
    for number in range(8):
        add(pool, number, size_bytes=MIB)
    assert [num_blobs(disk) for disk in disks] == [0, 8]
    assert pool.survey().limit_bytes < 15 * MIB
    assert conditions(pool) == ["well", "well"], "a full disk is not a sick one"
    (disks[0] / "filler").unlink()
    assert pool.survey().limit_bytes == 24 * MIB
    add(pool, 8, size_bytes=MIB)
    assert [num_blobs(disk) for disk in disks] == [1, 8]


def test_when_every_disk_is_full_a_shard_is_refused_at_once_with_the_numbers(
    disks: list[Path], pools: Callable[..., Pool]
) -> None:
    pool = pools(caches(disks))
    for disk in disks:
        fill(disk)
    with pytest.raises(DiskTrouble, match="above what shall stay free") as caught:
        pool.begin(key(1), size_bytes=MIB)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("floors", [Floors(min_free_bytes=4 * MIB), Floors(min_free_share=0.25)])
def test_the_floor_of_free_space_is_kept_whoever_fills_the_disk(
    disks: list[Path], pools: Callable[..., Pool], floors: Floors
) -> None:
    """Fault: others write. Promise: the quota shrinks byte by byte, so that evictions keep the floor free."""
    pool = pools(caches(disks[:1]), cache_bytes=15 * MIB, floors=floors)
    for number in range(6):
        add(pool, number, size_bytes=MIB)
    before = pool.survey().limit_bytes
    assert before == pytest.approx(12 * MIB, abs=2.5 * MIB)  # with the headroom of the index
    fill(disks[0], but_bytes=3 * MIB)
    limit_bytes = pool.survey().limit_bytes
    free_bytes = os.statvfs(disks[0]).f_bavail * os.statvfs(disks[0]).f_frsize
    own_bytes = sum(blob.used_bytes for blob in pool.resident()) + pool.survey().overhead_bytes
    assert limit_bytes == own_bytes - (4 * MIB - free_bytes)
    with pytest.raises(DiskTrouble):
        pool.begin(key(9), size_bytes=1000)


def test_inodes_of_which_too_few_are_free_count_like_space(tmp_path: Path, pools: Callable[..., Pool]) -> None:
    """Fault: others use up the inodes. Promise: the cache grows no more."""
    with mounted(tmp_path / "disk", "size=16m,nr_inodes=100"):
        pool = pools([tmp_path / "disk" / "cache"], cache_bytes=12 * MIB, floors=Floors(min_free_share=0.2))
        add(pool, 1, size_bytes=MIB)
        assert pool.survey().limit_bytes == 12 * MIB
        for number in range(75):
            (tmp_path / "disk" / f"other-{number}").touch()
        survey = pool.survey()
        assert survey.limit_bytes == pool.resident()[0].used_bytes + survey.overhead_bytes
        pool.close()


def test_a_read_only_disk_is_set_aside_still_serves_and_is_used_again(
    disks: list[Path], pools: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: EROFS. Promise: no more shards go there, what it holds is served, and after a rest it is tried again."""
    pool = pools(caches(disks))
    for number in range(4):
        add(pool, number, size_bytes=MIB)
    with refusing(disks[0], errno.EROFS):
        for number in range(4, 8):
            add(pool, number, size_bytes=MIB)
        assert conditions(pool) == ["read-only", "well"]
        assert "Read-only" in pool.status()[0].cause
        assert [num_blobs(disk) for disk in disks] == [2, 6]
        assert all(read(pool, number)[0] == content(number, MIB) for number in range(8))
        survey = pool.survey()
        assert survey.takes_shards
        assert survey.limit_bytes < 24 * MIB
    assert pool.survey().limit_bytes == survey.limit_bytes, "it rests"
    # The clock of this module alone: loops that earlier tests have left would take it for theirs.
    monkeypatch.setattr("cacheloader_daemon.store.member.time", SimpleNamespace(monotonic=lambda: 1e9))
    assert pool.survey().limit_bytes == 24 * MIB
    assert conditions(pool) == ["well", "well"]
    add(pool, 8, size_bytes=MIB)
    assert num_blobs(disks[0]) == 3


def test_when_every_disk_is_read_only_nothing_is_taken_and_nothing_lost(
    disks: list[Path], pools: Callable[..., Pool]
) -> None:
    pool = pools(caches(disks[:1]))
    add(pool, 1)
    with refusing(disks[0], errno.EROFS):
        with pytest.raises(DiskTrouble):
            pool.begin(key(2), size_bytes=10)
        assert not pool.survey().takes_shards
        with pytest.raises(DiskTrouble, match="read-only"):
            pool.begin(key(2), size_bytes=10)
        assert read(pool, 1)[0] == content(1)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "rename"])
def test_a_disk_that_fails_again_and_again_is_set_aside_and_one_failure_is_not_held_against_it(
    disks: list[Path], pools: Callable[..., Pool], call: str
) -> None:
    """Fault: EIO at each step of a download. Promise: nothing is left of it; the third time, others take the shards."""
    pool = pools(caches(disks[:1]))
    for turn in range(3):
        assert conditions(pool) == ["well"], turn
        with refusing(disks[0], errno.EIO, calls=[call]), pytest.raises(DiskTrouble):
            download(pool, turn)
        assert not [path for path in (disks[0] / "cache" / "blobs").rglob("*") if path.is_file()]
    assert conditions(pool) == ["failing"]
    assert "Input/output error" in pool.status()[0].cause


def test_a_device_that_is_gone_is_given_up_at_once(disks: list[Path], pools: Callable[..., Pool]) -> None:
    """Fault: ENODEV. Promise: the next shard goes to another disk, and the lost ones are told."""
    pool = pools(caches(disks))
    lost: list[bytes] = []
    pool.listen(lost.extend)
    for number in range(2):
        add(pool, number, size_bytes=MIB)
    with refusing(disks[0], errno.ENODEV):
        add(pool, 2, size_bytes=MIB)
        add(pool, 3, size_bytes=MIB)
    assert conditions(pool) == ["gone", "well"]
    assert lost == [key(0)]
    assert {blob.key for blob in pool.resident()} == {key(1), key(2), key(3)}


@pytest.mark.parametrize("notice", ["begin", "lease"])
def test_a_directory_that_vanishes_loses_its_blobs_alone(
    disks: list[Path], pools: Callable[..., Pool], notice: str
) -> None:
    """Fault: ``rm -rf`` of one cache directory. Promise: its blobs are reported lost at once; the others are served."""
    pool = pools(caches(disks))
    lost: list[bytes] = []
    pool.listen(lost.extend)
    for number in range(6):
        add(pool, number, size_bytes=MIB)
    gone = [number for number in range(6) if list((disks[0] / "cache" / "blobs").rglob(f"{key(number).hex()}*.data"))]
    shutil.rmtree(disks[0] / "cache")
    if notice == "lease":
        with pytest.raises(BlobLost):
            pool.lease(key(gone[0]))
    else:
        add(pool, 9, size_bytes=MIB)
    assert conditions(pool) == ["gone", "well"]
    assert sorted(lost) == sorted(key(number) for number in gone)
    left = [number for number in range(6) if number not in gone]
    assert all(read(pool, number)[0] == content(number, MIB) for number in left)
    assert len(pool.resident()) == len(left) + (notice == "begin")
    assert pool.survey().limit_bytes <= 12 * MIB


def test_a_directory_that_was_away_does_not_bring_a_shard_twice(disks: list[Path], pools: Callable[..., Pool]) -> None:
    one, two = caches(disks)
    for path in (one, two):
        pool = pools([path])
        add(pool, 1, size_bytes=MIB)
        pool.close()
    pool = pools([one, two])
    assert [blob.key for blob in pool.resident()] == [key(1)]
    assert [num_blobs(disk) for disk in disks] == [1, 0]


def test_manifests_and_sample_counts_are_found_in_whichever_directory_has_them(
    disks: list[Path], pools: Callable[..., Pool]
) -> None:
    pool = pools(caches(disks))
    pool.remember_samples(key(1), 10)
    pool.put_manifest("a" * 32, b"manifest")
    pool.close()
    turned = pools(list(reversed(caches(disks))))
    assert turned.samples(key(1)) == 10
    fd = turned.open_manifest("a" * 32)
    assert fd is not None
    assert os.read(fd, 100) == b"manifest"
    os.close(fd)
    fill(disks[1])
    turned.put_manifest("b" * 32, b"x" * 10_000)
    assert (disks[0] / "cache" / "manifests" / ("b" * 32)).exists()


def test_a_damaged_blob_is_set_aside_counts_and_is_kept_within_a_bound(
    disks: list[Path], pools: Callable[..., Pool]
) -> None:
    """Fault: a flipped bit at rest. Promise: no reader gets it; it is kept for inspection, and counts."""
    pool = pools(caches(disks[:1]), verify_on_lease=True)
    for number in range(7):
        add(pool, number, size_bytes=MIB)
    for number in range(6):
        flip_bit(file_of(disks[0] / "cache", number, "data"))
        with pytest.raises(BlobLost):
            pool.lease(key(number))
        assert key(number) not in pool
    assert read(pool, 6)[0] == content(6, MIB)
    kept = sorted((disks[0] / "cache" / "quarantine").glob("*.data"))
    assert [path.name[:2] for path in kept] == ["02", "03", "04", "05"], "the newest four"
    [status] = pool.status()
    assert status.store is not None
    assert (status.store.damaged, status.store.quarantined_blobs) == (6, 4)
    assert 4 * MIB <= pool.leftover_bytes == status.store.quarantined_bytes
    pool.close()
    again = pools(caches(disks[:1]))
    assert again.leftover_bytes == status.store.quarantined_bytes


def test_a_blob_larger_than_the_quarantine_is_removed(
    disks: list[Path], pools: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools(caches(disks[:1]), verify_on_lease=True)
    monkeypatch.setattr(pool._members[0].store._parts.quarantine, "_max_bytes", 1000)
    add(pool, 1)
    flip_bit(file_of(disks[0] / "cache", 1, "data"))
    with pytest.raises(BlobLost):
        pool.lease(key(1))
    assert pool.leftover_bytes == 0
    assert not list((disks[0] / "cache").rglob("*.data"))


def test_a_shard_is_committed_where_it_was_begun_although_others_have_more_room_now(
    disks: list[Path], pools: Callable[..., Pool]
) -> None:
    pool = pools(caches(disks))
    incoming = pool.begin(key(1), size_bytes=1000)
    for number in range(2, 6):
        add(pool, number, size_bytes=MIB)
    incoming.write_at(0, content(1, 1000))
    incoming.commit(b"", google_crc32c.value(content(1, 1000)))
    assert read(pool, 1)[0] == content(1, 1000)


def config(paths: list[Path], **options: object) -> DaemonConfig:
    return DaemonConfig(cache_dir=paths[0], cache_dirs=tuple(paths), cache_size="24MiB", **options)


def test_a_disk_that_is_broken_at_the_start_is_left_out_and_named(disks: list[Path]) -> None:
    """Fault: EROFS at the start. Promise: the daemon starts on the others."""
    remount(disks[1], "ro")
    try:
        with open_pool(config(caches(disks))) as pool:
            assert conditions(pool) == ["well", "unusable"]
            assert "Read-only" in pool.status()[1].cause
            add(pool, 1)
            assert pool.quota_bytes == 24 * MIB
    finally:
        remount(disks[1], "rw")


def test_a_start_without_any_directory_and_one_in_somebody_elses_ends_with_the_reason(disks: list[Path]) -> None:
    (disks[1] / "cache").mkdir()
    (disks[1] / "cache" / "thesis.tex").touch()
    with pytest.raises(CacheUnusable, match="not made by cacheloader"), open_pool(config(caches(disks))):
        pass
    for disk in disks:
        remount(disk, "ro")
    try:
        with pytest.raises(CacheUnusable, match="Read-only"), open_pool(config(caches(disks))):
            pass
    finally:
        for disk in disks:
            remount(disk, "rw")


def test_each_directory_is_locked_by_itself(disks: list[Path]) -> None:
    one, two = caches(disks)
    with (
        open_pool(config([one, two])),
        pytest.raises(DaemonUnavailable, match=f"uses the cache directory {two}"),
        open_pool(config([two])),
    ):
        pass
    with open_pool(config([two])):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_dirs": ["/a", "/a"]}, "names a directory twice"),
        ({"cache_dir": "/a", "cache_dirs": ["/a", "/b"]}, "names both cache_dir and cache_dirs"),
        ({"cache_dirs": ["/a", "/b"], "private": True}, "for a shared daemon"),
        ({"cache_dirs": []}, "no list of directories"),
        ({"cache_dirs": ["/a"], "min_free_share": 1.0}, "min_free_share=1.0"),
        ({"cache_dirs": ["/a"], "scrub_rate": "1KiB"}, "below 1MiB"),
        ({"cache_dirs": ["/a"], "scrub_interval_s": -1}, "scrub_interval_s=-1"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DaemonConfig.from_mapping(options, source="test")


def test_directories_may_be_listed_in_the_place_of_one() -> None:
    made = DaemonConfig.from_mapping({"cache_dirs": ["/a", "/b"]}, source="test")
    assert str(made.cache_dir) == "/a"
    assert [str(path) for path in made.cache_dirs] == ["/a", "/b"]
    assert [str(path) for path in DaemonConfig.from_mapping({"cache_dir": "/a"}, source="test").cache_dirs] == ["/a"]
