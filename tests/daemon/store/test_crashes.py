"""A daemon that dies at any moment, a power failure, a damaged index: nothing wrong is ever served."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import google_crc32c
import pytest
from cacheloader_daemon.store import BlobLost, Store
from cacheloader_daemon.store.lifeline import Lifeline, Phase, Record, current_boot_id
from cacheloader_daemon.store.names import BlobName

from tests.daemon.store.disks import add, content, file_of, flip_bit, key, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

STEPS = ("open", "rename", "unlink", "mkdir", "posix_fallocate", "pwrite", "fchmod", "utime", "fsync", "write")
"""Calls of the operating system before which the daemon is killed, one after the other."""


def life(directory: Path, tell: Callable[[bytes], object]) -> None:
    """What a daemon does; ``tell`` gets a letter for each promise that it has made."""
    store = Store.open(directory)
    add(store, 1)
    tell(b"1")
    read(store, 1)
    add(store, 2)
    tell(b"2")
    store.put_manifest("a" * 32, b"manifest")
    tell(b"m")
    store.sync()
    tell(b"e")
    store.evict(key(1))
    tell(b"E")
    partial = store.begin(key(4), size_bytes=10_000)
    partial.write_at(0, b"x" * 5_000)
    add(store, 3)
    tell(b"3")
    partial.abort()
    store.close()


def live_until(directory: Path, num_steps: int) -> tuple[bool, bytes]:
    """Run ``life`` in a process that kills itself before its n-th step; returns whether it did, and its promises."""
    promises, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        steps = 0

        def watched(call: Callable[..., object]) -> Callable[..., object]:
            def count(*args: object, **kwargs: object) -> object:
                nonlocal steps
                if steps == num_steps:
                    os.kill(os.getpid(), signal.SIGKILL)
                steps += 1
                return call(*args, **kwargs)

            return count

        write = os.write
        for name in STEPS:
            setattr(os, name, watched(getattr(os, name)))
        try:
            life(directory, lambda letter: write(told, letter))
        except BaseException as error:
            sys.__stderr__.write(repr(error))
            os._exit(1)
        os._exit(0)
    os.close(told)
    with os.fdopen(promises, "rb") as file:
        letters = file.read()
    _, status = os.waitpid(pid, 0)
    assert status in {0, signal.SIGKILL}, f"the daemon failed by itself: {status}"
    return status != 0, letters


def check_whole(store: Store, directory: Path) -> set[bytes]:
    """Every blob is readable and right, and there is nothing else below ``blobs``; returns the keys."""
    residents = {blob.key: blob for blob in store.resident()}
    for shard, blob in residents.items():
        data, index = read(store, shard[0])
        assert (data, index) == (content(shard[0]), b"index of %d" % shard[0])
        assert blob.size_bytes == len(data)
    names = [path for path in (directory / "blobs").rglob("*") if path.is_file()]
    parsed = [BlobName.parse(path.name, folder=path.parent.name) for path in names]
    assert {half[0].key for half in parsed if half is not None} == set(residents)
    assert len(names) == 2 * len(residents)
    return set(residents)


@pytest.mark.timeout(600)
def test_killed_before_any_step_the_next_start_finds_whole_blobs_and_keeps_every_promise(tmp_path: Path) -> None:
    num_steps, died = 0, True
    while died:
        directory = tmp_path / str(num_steps)
        died, promises = live_until(directory, num_steps)
        store = Store.open(directory)
        keys = check_whole(store, directory)
        for number, letter in ((2, b"2"), (3, b"3")):
            assert letter not in promises or key(number) in keys
        if b"1" in promises and b"e" not in promises:
            assert key(1) in keys
        if b"E" in promises:
            assert key(1) not in keys
        manifest = store.open_manifest("a" * 32)
        assert (b"m" in promises) <= (manifest is not None)
        if manifest is not None:
            assert os.read(manifest, 100) == b"manifest"
            os.close(manifest)
        add(store, 5)
        assert read(store, 5)[0] == content(5)
        store.close()
        num_steps += 1
    assert num_steps > 40, "few steps were watched"


@pytest.fixture
def filled(directory: Path) -> dict[bytes, tuple[int, int]]:
    """A cache of four blobs, closed; what it holds."""
    store = Store.open(directory)
    for number in range(4):
        add(store, number, size_bytes=10_000 * number)
    held = {blob.key: (blob.size_bytes, blob.used_bytes) for blob in store.resident()}
    store.close()
    return held


def held_by(store: Store) -> dict[bytes, tuple[int, int]]:
    return {blob.key: (blob.size_bytes, blob.used_bytes) for blob in store.resident()}


def remove_index(directory: Path) -> None:
    for path in (directory / "lmdb").iterdir():
        path.unlink()
    (directory / "lmdb").rmdir()


def overwrite_index(directory: Path) -> None:
    (directory / "lmdb" / "data.mdb").write_bytes(b"no index" * 4096)


def truncate_index(directory: Path) -> None:
    os.truncate(directory / "lmdb" / "data.mdb", 3 * 4096)


def empty_index(directory: Path) -> None:
    os.truncate(directory / "lmdb" / "data.mdb", 0)


def scramble_pages(directory: Path) -> None:
    path = directory / "lmdb" / "data.mdb"
    block = bytearray(path.read_bytes())
    block[2 * 4096 :] = b"\xee" * (len(block) - 2 * 4096)
    path.write_bytes(block)


@pytest.mark.parametrize("damage", [remove_index, overwrite_index, truncate_index, empty_index])
def test_an_index_that_is_gone_or_broken_is_rebuilt_from_names_and_equals_the_old_one(
    directory: Path, filled: dict[bytes, tuple[int, int]], damage: Callable[[Path], None]
) -> None:
    damage(directory)
    store = Store.open(directory)
    assert held_by(store) == filled
    assert store.statistics().suspect_blobs == 0, "the blobs were closed cleanly, only the index is gone"
    for number in range(4):
        assert read(store, number)[0] == content(number, 10_000 * number)
    store.close()


def test_rebuilt_order_of_use_is_that_of_publication(directory: Path, filled: dict[bytes, tuple[int, int]]) -> None:
    remove_index(directory)
    store = Store.open(directory)
    assert [blob.key for blob in store.resident()] == list(filled)
    store.close()


def test_an_index_that_killed_the_daemon_which_opened_it_is_not_opened_again(
    directory: Path, filled: dict[bytes, tuple[int, int]]
) -> None:
    """Damaged pages can crash LMDB itself; the next start must not crash in the same way."""
    scramble_pages(directory)
    leave_record(directory, phase=Phase.OPENING, boot_id=current_boot_id())
    store = Store.open(directory)
    assert held_by(store) == filled
    assert (directory / "lmdb.broken").exists()
    store.close()
    Store.open(directory).close()
    assert not (directory / "lmdb.broken").exists(), "it is kept until the next start only"


def leave_record(
    directory: Path, *, phase: Phase, boot_id: str, barrier_ns: int | None = None, doubtful: bool = False
) -> None:
    dir_fd = os.open(directory, os.O_RDONLY)
    lifeline = Lifeline(dir_fd)
    last = lifeline.read()
    assert last is not None
    lifeline.write(
        Record(
            boot_id=boot_id,
            phase=phase,
            barrier_ns=last.barrier_ns if barrier_ns is None else barrier_ns,
            doubtful=doubtful,
        )
    )
    os.close(dir_fd)


def lose_power(directory: Path, *, barrier_ns: int | None = None) -> None:
    leave_record(directory, phase=Phase.RUNNING, boot_id="an earlier boot", barrier_ns=barrier_ns)


@pytest.mark.parametrize("kind", ["data", "index"])
@pytest.mark.usefixtures("filled")
def test_after_a_power_failure_a_flipped_bit_is_found_before_the_first_lease(directory: Path, kind: str) -> None:
    lose_power(directory, barrier_ns=0)
    flip_bit(file_of(directory, 2, kind))
    store = Store.open(directory)
    assert store.statistics().suspect_blobs == 4
    with pytest.raises(KeyError):
        store.lease(key(2))
    assert list((directory / "blobs" / key(2)[:1].hex()).iterdir()) == []
    assert read(store, 3)[0] == content(3, 30_000)
    assert store.statistics().suspect_blobs == 2
    store.close()


@pytest.mark.usefixtures("filled")
def test_suspect_blobs_are_verified_side_by_side(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_power(directory, barrier_ns=0)
    store = Store.open(directory)
    both, verify = threading.Barrier(2, timeout=60), store._files.verify

    def verify_at_once(name: BlobName) -> None:
        both.wait()
        verify(name)

    monkeypatch.setattr(store._files, "verify", verify_at_once)
    with ThreadPoolExecutor(2) as threads:
        assert [found for found, _ in threads.map(lambda number: read(store, number), (1, 3))] == [
            content(1, 10_000),
            content(3, 30_000),
        ]
    assert store.statistics().suspect_blobs == 2
    store.close()


def verified_by_reading(store: Store, numbers: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Read blobs; which of them were compared with their checksums for that."""
    seen: list[int] = []
    verify = store._files.verify

    def watched(name: BlobName) -> None:
        seen.append(name.key[0])
        verify(name)

    monkeypatch.setattr(store._files, "verify", watched)
    for number in numbers:
        read(store, number)
    return seen


@pytest.mark.usefixtures("filled")
def test_blobs_that_had_reached_the_disk_are_not_verified(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_power(directory, barrier_ns=file_of(directory, 1, "data").stat().st_mtime_ns)
    store = Store.open(directory)
    assert verified_by_reading(store, range(4), monkeypatch) == [2, 3]
    assert store.statistics().suspect_blobs == 0
    store.close()


@pytest.mark.usefixtures("filled")
def test_what_had_reached_the_disk_is_still_known_after_more_restarts_and_flushes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Power fails. 2. A daemon flushes and closes. 3. Another one: only what was in doubt at 1 is verified."""
    lose_power(directory, barrier_ns=file_of(directory, 1, "data").stat().st_mtime_ns)
    store = Store.open(directory)
    add(store, 4)
    store.sync()
    store.close()
    store = Store.open(directory)
    assert verified_by_reading(store, range(5), monkeypatch) == [2, 3]
    store.close()


def test_a_flush_is_what_keeps_blobs_from_being_verified(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Published, flushed. 2. Published, not flushed. 3. Power fails. 4. The second alone is verified."""
    store = Store.open(directory)
    add(store, 1)
    store.sync()
    record_fd = os.open(directory, os.O_RDONLY)
    flushed = Lifeline(record_fd).read()
    os.close(record_fd)
    assert flushed is not None
    add(store, 2)
    store.close()
    lose_power(directory, barrier_ns=flushed.barrier_ns)
    reopened = Store.open(directory)
    assert verified_by_reading(reopened, (1, 2), monkeypatch) == [2]
    reopened.close()


@pytest.mark.usefixtures("filled")
def test_suspicion_outlives_a_clean_restart_and_ends_with_the_verification(directory: Path) -> None:
    lose_power(directory, barrier_ns=0)
    Store.open(directory).close()
    store = Store.open(directory)
    assert store.statistics().suspect_blobs == 4
    read(store, 1)
    store.close()
    store = Store.open(directory)
    assert store.statistics().suspect_blobs == 3
    store.close()
    remove_index(directory)
    store = Store.open(directory)
    assert store.statistics().suspect_blobs == 4, "which ones were verified is no longer known"
    store.close()


@pytest.mark.usefixtures("filled")
def test_a_daemon_that_was_killed_makes_nothing_suspect_but_what_it_left_is_flushed(directory: Path) -> None:
    leave_record(directory, phase=Phase.RUNNING, boot_id=current_boot_id(), barrier_ns=0)
    store = Store.open(directory)
    assert store.statistics().suspect_blobs == 0
    assert store._flushing.num_unflushed == 4
    store.sync()
    assert store._flushing.num_unflushed == 0
    store.close()


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x" * 512)])
def test_without_a_readable_record_every_blob_is_verified(directory: Path, spoil: Callable[[Path], object]) -> None:
    spoil(directory / "state")
    store = Store.open(directory)
    assert store.statistics().suspect_blobs == 4
    store.close()


@pytest.mark.usefixtures("filled")
def test_a_file_that_power_loss_cut_short_is_found_before_its_first_lease(directory: Path) -> None:
    lose_power(directory, barrier_ns=0)
    path = file_of(directory, 3, "data")
    path.chmod(0o600)
    os.truncate(path, 0)
    store = Store.open(directory)
    with pytest.raises(BlobLost):
        store.lease(key(3))
    assert len(store.resident()) == 3
    assert not path.exists()
    store.close()


@pytest.mark.usefixtures("filled")
def test_killed_while_it_opens_a_cache_beyond_doubt_the_next_daemon_doubts_nothing(directory: Path) -> None:
    leave_record(directory, phase=Phase.OPENING, boot_id=current_boot_id())
    store = Store.open(directory)
    assert store.statistics().suspect_blobs == 0
    store.close()


@pytest.mark.usefixtures("filled")
def test_leftovers_of_either_kind_are_removed_and_strange_files_are_not(directory: Path) -> None:
    folder = directory / "blobs" / key(1)[:1].hex()
    lone = {
        "data": BlobName(key=key(257), size_bytes=1, crc32c=0, index_bytes=1, index_crc32c=0).data,
        "index": BlobName(key=key(513), size_bytes=1, crc32c=0, index_bytes=1, index_crc32c=0).index,
        "temporary": f".{key(1).hex()}.0123456789abcdef.new",
    }
    for name in (*lone.values(), "holiday.jpg"):
        (folder / name).write_bytes(b"x")
    store = Store.open(directory)
    assert len(store.resident()) == 4
    assert not any((folder / name).exists() for name in lone.values())
    assert (folder / "holiday.jpg").exists()
    assert store.statistics().foreign_bytes > 0
    store.close()


def test_two_contents_of_one_version_become_the_newer_one(directory: Path) -> None:
    store = Store.open(directory)
    add(store, 1)
    store.close()
    old = {kind: file_of(directory, 1, kind).read_bytes() for kind in ("data", "index")}
    names = {kind: file_of(directory, 1, kind).name for kind in ("data", "index")}
    store = Store.open(directory)
    other = b"\xff" * 100_000
    incoming = store.begin(key(1), size_bytes=len(other))
    incoming.write_at(0, other)
    incoming.commit(b"", google_crc32c.value(other))
    store.close()
    for kind, name in names.items():
        path = directory / "blobs" / key(1)[:1].hex() / name
        path.write_bytes(old[kind])
        os.utime(path, (1, 1))
    remove_index(directory)
    store = Store.open(directory)
    assert read(store, 1)[0] == other
    assert len(list((directory / "blobs" / key(1)[:1].hex()).iterdir())) == 2
    store.close()
