"""A daemon that is killed at moments that nobody chose. ``STORE_KILLS=500`` is the long form; the seed is printed."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
from cacheloader_daemon.store import Pool, Store

from tests.daemon.store.disks import add, key
from tests.daemon.store.test_crashes import check_whole

if TYPE_CHECKING:
    from pathlib import Path

NUM_KILLS = int(os.environ.get("STORE_KILLS", "10"))
SEED = int(os.environ.get("CACHELOADER_TEST_SEED", random.SystemRandom().randrange(10**6)))

NUM_SHARDS = 24
LONGEST_LIFE_S = 0.15


def live(directories: list[Path], seed: int, told: int) -> None:
    """Publish, evict, lease and flush without end; tells the number of each blob that is published or evicted."""
    rng = random.Random(seed)
    pool = Pool([Store.open(path) for path in directories], cache_bytes=2**30)
    os.write(told, b"\xff")
    while True:
        number = rng.randrange(NUM_SHARDS)
        match rng.randrange(8):
            case 0 | 1 | 2 | 3 if key(number) not in pool:
                add(pool, number)
                os.write(told, bytes([number]))
            case 4 | 5:
                os.write(told, bytes([number + 64]))
                pool.evict(key(number))
            case 6:
                pool.sync()
            case 7 if key(number) in pool:
                leased = pool.lease(key(number))
                os.close(leased.data_fd)
                os.close(leased.index_fd)
            case _:
                pass


def killed_after(life_s: float, directories: list[Path], seed: int) -> bytes:
    """Start a process that lives so, and kill it so long after it has opened its store; returns what it told."""
    promises, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(promises)
            live(directories, seed, told)
        except BaseException as error:
            sys.__stderr__.write(repr(error))
        os._exit(1)
    os.close(told)
    with os.fdopen(promises, "rb") as file:
        if life_s >= 0.02:
            assert file.read(1) == b"\xff", "it opens its store"
        time.sleep(life_s)
        os.kill(pid, signal.SIGKILL)
        letters = file.read()
    _, status = os.waitpid(pid, 0)
    assert status == signal.SIGKILL, f"the daemon ended by itself: {status}"
    return letters.replace(b"\xff", b"")


@pytest.mark.timeout(120 + 20 * NUM_KILLS)
def test_killed_at_any_moment_what_was_published_is_whole_and_there_and_nothing_else_is(tmp_path: Path) -> None:
    """Fault: SIGKILL, again and again, on one cache. Promise: every blob whole, none missing, no debris, no leak."""
    print(f"CACHELOADER_TEST_SEED={SEED} STORE_KILLS={NUM_KILLS}")
    rng = random.Random(SEED)
    directories = [tmp_path / "one", tmp_path / "two"]
    there: set[int] = set()
    for turn in range(NUM_KILLS):
        letters = killed_after(rng.choice((0.0, rng.random())) * LONGEST_LIFE_S, directories, rng.randrange(2**32))
        unsure: set[int] = set()
        for letter in letters:
            number = letter % 64
            unsure = set()
            if letter < 64:
                there.add(number)
            else:
                # Told before: whether it came to that is not known if it is the last thing told.
                there.discard(number)
                unsure = {number}
        stores = [Store.open(path) for path in directories]
        found = {
            shard[0] for store, path in zip(stores, directories, strict=True) for shard in check_whole(store, path)
        }
        # One publication may have ended just before it was told.
        assert there - unsure <= found, f"turn {turn}: {sorted(there - found)} are missing"
        assert len(found - there - unsure) <= 1, f"turn {turn}: {sorted(found - there)} are there"
        there = found
        for store in stores:
            assert not store.statistics().suspect_blobs
            store.close()
