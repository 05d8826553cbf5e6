"""What a disk spoils while nobody reads it is found by reading it again, slowly."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from cacheloader_daemon.store import BlobLost, Pool, Scrubber, Store

from tests.daemon.store.disks import add, content, file_of, flip_bit, key, read
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def pool(directory: Path) -> Iterator[Pool]:
    pool = Pool([Store.open(directory)], cache_bytes=2**30)
    yield pool
    pool.close()


def test_a_bit_that_flips_at_rest_is_found_without_a_reader_and_told(pool: Pool, directory: Path) -> None:
    """Fault: a flipped bit at rest. Promise: the scrub sets the blob aside, tells it, and leaves the others."""
    for number in range(4):
        add(pool, number, size_bytes=3_000_000 + number)
    lost: list[bytes] = []
    pool.listen(lost.extend)
    flip_bit(file_of(directory, 1, "data"))
    flip_bit(file_of(directory, 2, "index"))
    scrubber = Scrubber(pool, interval_s=0.2, max_bytes_per_s=2**30)
    try:
        wait_until(lambda: len(lost) == 2, timeout_s=60)  # nobody is as nice as it
        wait_until(lambda: scrubber.num_blobs >= 8, timeout_s=60)
    finally:
        scrubber.stop()
    assert sorted(lost) == [key(1), key(2)]
    assert sorted(blob.key for blob in pool.resident()) == [key(0), key(3)]
    assert read(pool, 3)[0] == content(3, 3_000_003)
    assert len(list((directory / "quarantine").iterdir())) == 4


def test_a_blob_that_is_evicted_under_the_scrub_is_not_called_lost(pool: Pool) -> None:
    add(pool, 1)
    lost: list[bytes] = []
    pool.listen(lost.extend)

    def evicted_meanwhile(fd: int, size_bytes: int) -> int:
        pool.evict(key(1))
        return 0

    assert not pool.verify(key(1), evicted_meanwhile)
    assert not pool.verify(key(1), evicted_meanwhile)
    [status] = pool.status()
    assert status.store is not None
    assert (status.store.lost, status.store.damaged, status.store.evicted) == (0, 0, 1)
    with pytest.raises(BlobLost):
        pool.lease(key(1))


def test_it_keeps_to_its_rate(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight megabytes at eight a second take a second at least, and stopping does not wait for the rest."""
    add(pool, 1, size_bytes=8 * 2**20)
    monkeypatch.setattr(pool, "all_keys", list)  # its own thread has one buffer with us
    begun_s = time.monotonic()
    scrubber = Scrubber(pool, interval_s=3600.0, max_bytes_per_s=8 * 2**20)
    try:
        scrubber._check(key(1))
        assert time.monotonic() - begun_s >= 0.9
    finally:
        scrubber.stop()


def test_it_is_as_nice_as_can_be_and_sleeps_between_blobs(pool: Pool) -> None:
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    add(pool, 1)
    scrubber = Scrubber(pool, interval_s=3600.0, max_bytes_per_s=2**30)
    try:
        thread = scrubber._thread.native_id
        assert thread is not None
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, thread) == 19)
        assert os.getpriority(os.PRIO_PROCESS, os.getpid()) == own
    finally:
        scrubber.stop()
    assert not scrubber._thread.is_alive()


def test_reading_past_the_page_cache_sees_what_is_on_the_disk(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is right for lengths that are no multiple of a block, whether or not the file system can do it."""
    monkeypatch.setattr(pool, "all_keys", list)  # its own thread, which may come late, has one buffer with us
    scrubber = Scrubber(pool, interval_s=3600.0, max_bytes_per_s=2**40)
    try:
        for number, size_bytes in enumerate((0, 1, 4095, 4096, 2**20, 2**20 + 1, 3_333_333)):
            add(pool, number, size_bytes=size_bytes)
            pool.sync()
            assert pool.verify(key(number), scrubber._sum_up)
    finally:
        scrubber.stop()
