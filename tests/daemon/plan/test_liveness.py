"""Any history of any sessions: the quota is kept throughout, and in the end nobody waits.

``Node`` checks after every event that the disk holds no more than the quota, that no leased blob is evicted, that no
shard is fetched twice, that each request is answered once, and the planner's invariants.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.daemon.plan.node import Node, shards

SIZES = (5, 10, 10, 20, 35, 10, 45, 10)
NUM_SHARDS = len(SIZES)
QUOTA_BYTES = 50


class History(RuleBasedStateMachine):
    @initialize(
        resident=st.lists(st.integers(0, NUM_SHARDS - 1), unique=True),
        overhead_bytes=st.integers(0, 8),
        max_fetches=st.integers(1, 3),
        lookahead_bytes=st.sampled_from([None, 0, 15, 1000]),
    )
    def start(self, resident: list[int], overhead_bytes: int, max_fetches: int, lookahead_bytes: int | None) -> None:
        self.node = Node(
            QUOTA_BYTES,
            resident=[(shard, SIZES[shard]) for shard in resident],
            overhead_bytes=overhead_bytes,
            max_fetches=max_fetches,
            lookahead_bytes=lookahead_bytes,
        )
        self.clocks: dict[int, int] = {}

    def _session(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.node.refs)), label="session")

    @rule(data=st.data())
    @precondition(lambda self: len(self.node.refs) < 4)
    def open(self, data: st.DataObject) -> None:
        session = max(self.clocks, default=0) + 1
        self.clocks[session] = 0
        first = data.draw(st.sampled_from([0, 0, 3]), label="first shard of the data set")
        self.node.open(session, shards(*SIZES)[first:])

    @rule(data=st.data())
    @precondition(lambda self: self.node.refs)
    def close(self, data: st.DataObject) -> None:
        self.node.close(self._session(data))

    @rule(data=st.data())
    @precondition(lambda self: self.node.refs)
    def follow(self, data: st.DataObject) -> None:
        session = self._session(data)
        num_shards = len(self.node.refs[session])
        rows = st.tuples(st.integers(0, 30), st.integers(1, 10), st.integers(0, num_shards - 1))
        accesses = sorted((at, at + rows, shard) for at, rows, shard in data.draw(st.lists(rows, max_size=12)))
        self.clocks[session] = data.draw(st.integers(0, 10))
        self.node.follow(session, accesses, clock=self.clocks[session])

    @rule(data=st.data(), rows=st.integers(1, 12))
    @precondition(lambda self: self.node.refs)
    def advance(self, data: st.DataObject, rows: int) -> None:
        session = self._session(data)
        self.clocks[session] += rows
        self.node.advance(session, self.clocks[session])

    @rule(data=st.data())
    @precondition(lambda self: self.node.refs)
    def demand(self, data: st.DataObject) -> None:
        session = self._session(data)
        self.node.demand(session, data.draw(st.integers(0, len(self.node.refs[session]) - 1), label="shard"))

    @rule(data=st.data())
    @precondition(lambda self: +self.node.leases)
    def release(self, data: st.DataObject) -> None:
        session, shard = data.draw(st.sampled_from(sorted(+self.node.leases)), label="lease")
        self.node.release_number(session, shard)

    @rule(data=st.data(), saved_bytes=st.integers(0, 3))
    @precondition(lambda self: self.node.fetching)
    def finish(self, data: st.DataObject, saved_bytes: int) -> None:
        shard = data.draw(st.sampled_from(sorted(self.node.fetching)), label="fetch")
        self.node.finish(shard, SIZES[shard] - saved_bytes)

    @rule(data=st.data(), disk=st.booleans())
    @precondition(lambda self: self.node.fetching)
    def fail(self, data: st.DataObject, disk: bool) -> None:
        self.node.fail(data.draw(st.sampled_from(sorted(self.node.fetching)), label="fetch"), disk=disk)

    @rule(data=st.data())
    @precondition(lambda self: self.node.evicting)
    def drop(self, data: st.DataObject) -> None:
        self.node.drop(data.draw(st.sampled_from(sorted(self.node.evicting)), label="victim"))

    @rule(data=st.data())
    @precondition(lambda self: set(self.node.blobs) - self.node.evicting)
    def lose(self, data: st.DataObject) -> None:
        self.node.lose(data.draw(st.sampled_from(sorted(set(self.node.blobs) - self.node.evicting)), label="blob"))

    @rule(overhead_bytes=st.integers(0, 15))
    def measure_overhead(self, overhead_bytes: int) -> None:
        self.node.set_overhead(overhead_bytes)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 70.0]))
    def pass_time(self, seconds: float) -> None:
        self.node.now_s += seconds
        wake_at_s = self.node.planner.wake_at_s
        if wake_at_s is not None and wake_at_s <= self.node.now_s:
            self.node.wake()

    def teardown(self) -> None:
        """Fetches and evictions finish, whoever waits for nothing gives back its leases: then nobody waits."""
        if not hasattr(self, "node"):
            return
        node = self.node
        for _ in range(200):
            node.settle()
            waiting = {session for session, _ in node.waiting}
            idle = [(session, shard) for session, shard in +node.leases if session not in waiting]
            for session, shard in idle:
                node.release_number(session, shard)
            if idle or node.fetching or node.evicting:
                continue
            if not node.waiting:
                break
            # Nothing moves any more and somebody waits, for a session that is counted on to move: the alarm is set.
            wake_at_s = node.planner.wake_at_s
            assert wake_at_s is not None, "somebody waits for ever"
            node.now_s = max(node.now_s, wake_at_s)
            node.wake()
        assert not node.waiting
        assert node.planner.statistics().waiting_requests == 0


History.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestHistory = History.TestCase
