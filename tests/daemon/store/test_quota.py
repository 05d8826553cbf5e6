"""The quota is never exceeded on the disk: planner and pool together, on real files, counted as ``du`` counts.

What counts: blobs, downloads on their way, blobs that were unlinked while a reader has them open, damaged blobs that
are kept, index, log and folders. The long form: ``QUOTA_EXAMPLES=500 pytest tests/daemon/store/test_quota.py``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import google_crc32c
from cacheloader_daemon.plan import effects, events
from cacheloader_daemon.plan.machine import Planner
from cacheloader_daemon.plan.options import PlannerOptions
from cacheloader_daemon.store import BlobLost, Pool, Store
from cacheloader_daemon.store import store as store_module
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.daemon.store.disks import content, flip_bit, key

if TYPE_CHECKING:
    from cacheloader_daemon.store import Incoming, LeasedFiles

NUM_SHARDS = 12
SIZES = [10_000 + 15_000 * number for number in range(NUM_SHARDS)]

HEADROOM_BYTES = 2**16
QUOTA_BYTES = 2**20
"""Room for a third of the shards. By as little as this the overhead is overstated here: the megabytes that a daemon
sets aside for its index would hide whatever was forgotten."""

NUM_EXAMPLES = int(os.environ.get("QUOTA_EXAMPLES", "8"))
picks = st.integers(0, 2**16)


class Node(RuleBasedStateMachine):
    """One session that asks for shards, and everything that its daemon does, step by step, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(store_module, "HEADROOM_BYTES", HEADROOM_BYTES)
        self.patch.start()
        self.folder = Path(tempfile.mkdtemp(prefix="quota-"))
        self.directories = [self.folder / "one", self.folder / "two"]
        self.pool = Pool([Store.open(path) for path in self.directories], cache_bytes=QUOTA_BYTES, verify_on_lease=True)
        self.planner = Planner(PlannerOptions(quota_bytes=QUOTA_BYTES, max_fetches=4))
        self.now_s = 0.0
        self.requests = 0
        self.ordered: list[bytes] = []
        self.incoming: dict[bytes, Incoming] = {}
        self.victims: list[bytes] = []
        self.granted: list[bytes] = []
        self.leases: list[tuple[bytes, LeasedFiles]] = []
        self.dropped: set[bytes] = set()
        shards = [
            events.ShardRef(key=key(number), reserve_bytes=self.pool.reserve_bytes(size_bytes))
            for number, size_bytes in enumerate(SIZES)
        ]
        self.measure()
        self.tell(events.SessionOpened(session=1, shards=shards))

    def teardown(self) -> None:
        for incoming in self.incoming.values():
            incoming.abort()
        for _, leased in self.leases:
            close(leased)
        self.pool.close()
        self.patch.stop()
        shutil.rmtree(self.folder)

    def tell(self, event: events.Event | None) -> None:
        self.now_s += 0.01
        if isinstance(event, events.Dropped):
            self.measure()
        wanted = self.planner.wake(self.now_s) if event is None else self.planner.handle(event, self.now_s)
        for effect in wanted:
            match effect:
                case effects.Fetch():
                    self.ordered.append(effect.key)
                    self.dropped.discard(effect.key)
                case effects.Evict():
                    self.victims.append(effect.key)
                case effects.Grant():
                    self.granted.append(effect.key)

    def measure(self) -> None:
        survey = self.pool.survey()
        self.planner.set_room(survey.limit_bytes, takes_shards=survey.takes_shards)
        self.planner.set_overhead(survey.overhead_bytes + self.pool.leftover_bytes)

    def drop(self, lost: bytes) -> None:
        if lost not in self.dropped and self.planner.is_resident(lost):
            self.dropped.add(lost)
            self.tell(events.Dropped(key=lost))

    @rule(pick=picks)
    def ask(self, pick: int) -> None:
        self.requests += 1
        self.tell(events.Demanded(session=1, request=self.requests, shard=pick % NUM_SHARDS))

    @precondition(lambda self: self.ordered)
    @rule(pick=picks)
    def begin(self, pick: int) -> None:
        shard = self.ordered.pop(pick % len(self.ordered))
        self.incoming[shard] = self.pool.begin(shard, size_bytes=SIZES[shard[0]])

    @precondition(lambda self: self.incoming)
    @rule(pick=picks, index_bytes=st.integers(0, 65_536))
    def finish(self, pick: int, index_bytes: int) -> None:
        shard = sorted(self.incoming)[pick % len(self.incoming)]
        incoming, data = self.incoming.pop(shard), content(shard[0], SIZES[shard[0]])
        incoming.write_at(0, data)
        used_bytes = incoming.commit(b"i" * index_bytes, google_crc32c.value(data))
        self.tell(events.FetchFinished(key=shard, used_bytes=used_bytes))

    @precondition(lambda self: self.incoming)
    @rule(pick=picks)
    def fail(self, pick: int) -> None:
        shard = sorted(self.incoming)[pick % len(self.incoming)]
        self.incoming.pop(shard).abort()
        self.tell(events.FetchFailed(key=shard, disk=False))

    @precondition(lambda self: self.granted)
    @rule(pick=picks)
    def lease(self, pick: int) -> None:
        shard = self.granted.pop(pick % len(self.granted))
        try:
            self.leases.append((shard, self.pool.lease(shard)))
        except BlobLost:
            self.drop(shard)
            self.tell(events.Released(session=1, shard=shard[0]))

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        shard, leased = self.leases.pop(pick % len(self.leases))
        close(leased)
        self.tell(events.Released(session=1, shard=shard[0]))

    @precondition(lambda self: self.victims)
    @rule(pick=picks)
    def evict(self, pick: int) -> None:
        shard = self.victims.pop(pick % len(self.victims))
        self.pool.evict(shard)
        self.tell(events.Dropped(key=shard))

    @precondition(lambda self: self.pool.resident())
    @rule(pick=picks, damage=st.booleans())
    def spoil(self, pick: int, *, damage: bool) -> None:
        """A blob's file is damaged or removed, leased or not; the scrub finds it."""
        blobs = self.pool.resident()
        shard = blobs[pick % len(blobs)].key
        if not self.planner.is_resident(shard):
            return
        [path] = [path for top in self.directories for path in top.glob(f"blobs/*/{shard.hex()}-*.data")]
        if damage:
            flip_bit(path)
        else:
            path.unlink()
        assert not self.pool.verify(shard, lambda fd, size: google_crc32c.value(os.pread(fd, size, 0)))
        self.drop(shard)

    @rule()
    def flush(self) -> None:
        self.pool.sync()
        self.measure()
        self.tell(None)

    @invariant()
    def keeps_the_quota(self) -> None:
        seen: set[tuple[int, int]] = set()
        total = 0
        for top in self.directories:
            for path in (top, *top.rglob("*")):
                total += allocated(os.lstat(path), seen)
        for _, leased in self.leases:
            total += allocated(os.fstat(leased.data_fd), seen) + allocated(os.fstat(leased.index_fd), seen)
        assert total <= QUOTA_BYTES, f"{total} bytes are on disk"
        self.planner.check_invariants()


def allocated(status: os.stat_result, seen: set[tuple[int, int]]) -> int:
    """Bytes of a file that was not seen before."""
    inode = status.st_dev, status.st_ino
    if inode in seen:
        return 0
    seen.add(inode)
    return status.st_blocks * 512


def close(leased: LeasedFiles) -> None:
    os.close(leased.data_fd)
    os.close(leased.index_fd)


TestQuota = Node.TestCase
TestQuota.settings = settings(max_examples=NUM_EXAMPLES, stateful_step_count=40, deadline=None)
