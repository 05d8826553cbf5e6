"""The order of victims against a search through all residents."""

from __future__ import annotations

import numpy as np
from cacheloader_daemon.plan.eviction import MARGIN, VictimOrder, may_replace
from cacheloader_daemon.plan.horizon import INFINITE, Horizon
from cacheloader_daemon.plan.readers import LazyHeap, Session
from hypothesis import given
from hypothesis import strategies as st

from tests.daemon.plan.node import key, number, plan_of, shards

NUM_SHARDS = 8


class Oracle:
    """Victims by definition: every listed key looked up in every plan."""

    def __init__(self) -> None:
        self.horizon = Horizon()
        self.used: dict[bytes, int] = {}
        self.order = VictimOrder(self.horizon, lambda shard: self.used[shard])
        self.listed: set[bytes] = set()
        self.sessions: dict[int, Session] = {}
        self.accesses: dict[int, list[tuple[int, int, int]]] = {}
        self.refs = shards(*[1] * NUM_SHARDS)

    def seconds(self, shard: bytes) -> float:
        times = [INFINITE]
        for session, accesses in self.accesses.items():
            clock = self.sessions[session].clock
            coming = [first for first, stop, of in accesses if of == number(shard) and stop > clock]
            times += [max(0.0, float(first - clock)) for first in coming[:1]]
        return min(times)

    def farthest(self) -> tuple[set[bytes], float]:
        """All keys that may come first, and their time."""
        unplanned = [shard for shard in self.listed if self.seconds(shard) == INFINITE]
        if unplanned:
            return {min(unplanned, key=lambda shard: self.used[shard])}, INFINITE
        farthest_s = max((self.seconds(shard) for shard in self.listed), default=-1.0)
        return {shard for shard in self.listed if self.seconds(shard) * (1 + MARGIN) >= farthest_s}, farthest_s

    def check(self) -> None:
        victim = self.order.farthest(0.0)
        may_come, farthest_s = self.farthest()
        if not may_come:
            assert victim is None
            return
        assert victim is not None
        assert victim.key in may_come
        assert victim.seconds == self.seconds(victim.key)
        if farthest_s == INFINITE:
            assert victim.seconds == INFINITE


accesses_of_a_plan = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(0, NUM_SHARDS - 1)).map(
        lambda row: (row[0], row[0] + row[1], row[2])
    ),
    max_size=20,
).map(sorted)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("list"), st.integers(0, NUM_SHARDS - 1)),
        st.tuples(st.just("discard"), st.integers(0, NUM_SHARDS - 1)),
        st.tuples(st.just("follow"), st.integers(0, 2), accesses_of_a_plan, st.integers(0, 20)),
        st.tuples(st.just("follow like"), st.integers(0, 2), st.integers(0, 2), st.integers(0, 20)),
        st.tuples(st.just("advance"), st.integers(0, 2), st.integers(1, 15)),
        st.tuples(st.just("leave"), st.integers(0, 2)),
    ),
    max_size=30,
)


@given(steps)
def test_first_victim_is_the_unplanned_one_used_longest_ago_or_the_one_needed_last(script: list[tuple]) -> None:
    oracle = Oracle()
    for turn, step in enumerate(script):
        match step:
            case ("list", shard):
                oracle.used[key(shard)] = turn
                oracle.listed.add(key(shard))
                oracle.order.add(key(shard), 0.0)
            case ("discard", shard):
                oracle.listed.discard(key(shard))
                oracle.order.discard(key(shard))
            case ("follow", session, accesses, clock):
                _follow(oracle, session, accesses, clock)
            case ("follow like", session, other, clock):
                _follow(oracle, session, oracle.accesses.get(other, []), clock)
            case ("advance", session, rows) if session in oracle.accesses:
                moved = oracle.sessions[session]
                moved.clock += rows
                assert moved.reader is not None
                for place in moved.reader.pass_rows().tolist():
                    oracle.order.passed(key(place), moved.reader, 0.0)
            case ("leave", session) if session in oracle.accesses:
                del oracle.accesses[session]
                former = oracle.horizon.leave(oracle.sessions[session])
                assert former is not None
                oracle.order.left(former)
        assert len(oracle.order) == len(oracle.listed)
        oracle.check()


def _follow(oracle: Oracle, number_of: int, accesses: list[tuple[int, int, int]], clock: int) -> None:
    if number_of not in oracle.sessions:
        oracle.sessions[number_of] = Session(number_of, oracle.horizon.open(oracle.refs), 0.0)
    session = oracle.sessions[number_of]
    table = session.catalog.table(plan_of(number_of, accesses))
    former = oracle.horizon.leave(session)
    session.clock = clock
    oracle.accesses[number_of] = accesses
    oracle.order.followed(oracle.horizon.follow(session, table), former)


@given(st.lists(st.tuples(st.sampled_from("pdt"), st.integers(0, 5), st.integers(0, 9)), max_size=300))
def test_lazy_heap_gives_the_smallest_number_whatever_was_moved_or_removed(script: list[tuple[str, int, int]]) -> None:
    heap, model = LazyHeap(), dict[bytes, int]()
    for what, shard, at in script:
        if what == "p":
            heap.put(key(shard), at)
            model[key(shard)] = at
        elif what == "d":
            heap.discard(key(shard))
            model.pop(key(shard), None)
        top = heap.top()
        assert (top is None) == (not model)
        if top is not None:
            assert top[0] == min(model.values())
            assert model[top[1]] == top[0]
        assert dict.fromkeys(heap) == dict.fromkeys(model)


def test_lazy_heap_does_not_grow_with_the_number_of_moves() -> None:
    heap = LazyHeap()
    for at in range(10_000):
        heap.put(key(at % 10), at)
    assert len(heap._entries) < 200


def test_nothing_is_evicted_for_a_shard_that_is_needed_at_the_same_time_or_later() -> None:
    assert may_replace(victim_s=INFINITE, incoming_s=1e9)
    assert may_replace(victim_s=0.001, incoming_s=0.0)
    assert not may_replace(victim_s=0.0, incoming_s=0.0)
    assert not may_replace(victim_s=10.0, incoming_s=10.0)
    assert not may_replace(victim_s=10.5, incoming_s=10.0)


def test_victims_that_would_not_suffice_are_all_spared() -> None:
    oracle = Oracle()
    _follow(oracle, 0, [(5, 9, 0), (50, 60, 1), (90, 99, 2)], 0)
    for shard in range(3):
        oracle.used[key(shard)] = shard
        oracle.order.add(key(shard), 0.0)
    assert oracle.order.choose(3, incoming_s=20.0, now_s=0.0, size_bytes=lambda _: 1, is_ahead=lambda _: False) is None
    assert len(oracle.order) == 3
    chosen = oracle.order.choose(2, incoming_s=20.0, now_s=0.0, size_bytes=lambda _: 1, is_ahead=lambda _: False)
    assert chosen is not None
    assert [number(victim.key) for victim in chosen] == [2, 1]
    assert np.isfinite(chosen[0].seconds)
