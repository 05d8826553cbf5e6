"""Which shards stay, and that what is to stay does."""

from __future__ import annotations

import numpy as np
import pytest
from cacheloader_daemon.plan import retention
from cacheloader_daemon.plan.accesses import AccessTable, plan_digest
from hypothesis import given
from hypothesis import strategies as st

from tests.daemon.plan.node import Node, key, shards

NUM_SHARDS = 12


def table(accesses: list[tuple[int, int, int]], *, num_shards: int = NUM_SHARDS) -> AccessTable:
    rows = sorted(accesses)
    first = np.array([row[0] for row in rows], dtype=np.int64)
    stop = np.array([row[1] for row in rows], dtype=np.int64)
    shard = np.array([row[2] for row in rows], dtype=np.int32)
    return AccessTable(
        digest=plan_digest(first, stop, shard),
        first_clock=first,
        stop_clock=stop,
        shard=shard,
        canonical=np.arange(num_shards, dtype=np.int32),
        reserve_bytes=np.ones(num_shards, dtype=np.int64),
    )


def epochs(*orders: list[int], first: int = 0) -> AccessTable:
    return table(
        [
            (10 * (len(order) * (first + epoch) + place), 10 * (len(order) * (first + epoch) + place + 1), shard)
            for epoch, order in enumerate(orders)
            for place, shard in enumerate(order)
        ]
    )


ORDERS = [np.random.default_rng(seed).permutation(NUM_SHARDS).tolist() for seed in range(4)]


def test_plans_of_one_rank_whose_workers_are_in_different_epochs_are_one_reading() -> None:
    assert retention.is_same_scan(epochs(ORDERS[0], ORDERS[1]), epochs(ORDERS[1], ORDERS[2], first=1))
    assert len(retention.scans([epochs(ORDERS[0], ORDERS[1]), epochs(ORDERS[1], ORDERS[2], first=1)])) == 1


def test_two_jobs_with_seeds_of_their_own_share_what_both_read() -> None:
    used = retention.scans([epochs(ORDERS[0], ORDERS[1]), epochs(ORDERS[2], ORDERS[3])])
    assert len(used) == 2
    together, is_shared = retention.union(used, np.ones(NUM_SHARDS, dtype=np.int64))
    assert together.all()
    assert is_shared


def test_ranks_with_parts_of_their_own_share_nothing() -> None:
    used = retention.scans([epochs([0, 1, 2, 3, 4], [3, 1, 2, 0, 4]), epochs([5, 6, 7, 8, 4], [8, 6, 4, 7, 5])])
    assert not retention.union(used, np.ones(NUM_SHARDS, dtype=np.int64))[1]


def known_rows(one: AccessTable, other: AccessTable) -> list[list[tuple[int, int]]]:
    """Of both, the accesses that begin after both plans have begun and before either has no more."""
    begin = max(table.first_clock[0] for table in (one, other))
    end = min(table.first_clock[-1] for table in (one, other))
    return [
        [
            (first, shard)
            for first, shard in zip(table.first_clock.tolist(), table.shard.tolist(), strict=True)
            if begin < first <= end
        ]
        for table in (one, other)
    ]


def scans_by_comparing_all(tables: list[AccessTable]) -> list[list[bool]]:
    groups: list[list[AccessTable]] = []
    for one in tables:
        for group in groups:
            if one.num_accesses and group[0].num_accesses:
                ours, theirs = known_rows(group[0], one)
                if ours and ours == theirs:
                    group.append(one)
                    break
        else:
            groups.append([one])
    return [[any(one.used[shard] for one in group) for shard in range(NUM_SHARDS)] for group in groups]


_PARTS = st.tuples(
    st.sampled_from(ORDERS[:3]), st.integers(0, 20), st.integers(0, 20), st.sampled_from([10, 10, 10, 20])
)


@given(st.lists(st.tuples(_PARTS, st.none() | st.tuples(st.integers(0, 19), st.integers(0, 3))), max_size=8))
def test_readings_are_those_that_comparing_every_plan_with_every_other_finds(
    parts: list[tuple[tuple[list[int], int, int, int], tuple[int, int] | None]],
) -> None:
    tables = []
    for (order, begin, size, step), change in parts:
        # Rows in threes where the step is short: a window's shards begin together.
        accesses = [
            (step * (row // 3), step * (row // 3) + step, order[row % 12]) for row in range(begin, begin + size)
        ]
        if change is not None and change[0] < len(accesses):
            accesses[change[0]] = (*accesses[change[0]][:2], change[1])
        tables.append(table(accesses))
    assert [used.tolist() for used in retention.scans(tables)] == scans_by_comparing_all(tables)


def test_plans_of_many_readings_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, compared = np.random.default_rng(5), []
    is_same_scan = retention.is_same_scan

    def counted(one: AccessTable, other: AccessTable) -> bool:
        compared.append((one, other))
        return is_same_scan(one, other)

    monkeypatch.setattr(retention, "is_same_scan", counted)
    tables = []
    for job in range(100):
        # Ranks of jobs in two epochs, each with shards of its own, and two workers of each.
        orders = [(3 * job + generator.permutation(3)).tolist() for _ in range(3)]
        for first in (0, 1):
            rows = [
                (10 * (3 * (first + epoch) + place), 10 * (3 * (first + epoch) + place + 1), shard)
                for epoch, order in enumerate(orders[first : first + 2])
                for place, shard in enumerate(order)
            ]
            tables.append(table(rows, num_shards=300))
    assert len(retention.scans(tables)) == 100
    assert len(compared) == 100, "each second plan with the first one of its own reading"


@given(
    st.lists(st.booleans(), min_size=NUM_SHARDS, max_size=NUM_SHARDS),
    st.lists(st.integers(1, 9), min_size=NUM_SHARDS, max_size=NUM_SHARDS),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_what_stays_is_used_fits_and_only_grows_with_the_budget(
    used: list[bool], sizes: list[int], budget: int, more: int
) -> None:
    rank = np.random.default_rng(1).permutation(NUM_SHARDS)
    reserve = np.array(sizes, dtype=np.int64)
    kept = retention.chosen(np.array(used), rank=rank, reserve_bytes=reserve, budget_bytes=budget)
    assert not (kept & ~np.array(used)).any()
    assert reserve[kept].sum() <= budget
    larger = retention.chosen(np.array(used), rank=rank, reserve_bytes=reserve, budget_bytes=budget + more)
    assert not (kept & ~larger).any()


def scan(node: Node, session: int, order: list[int], *, epoch: int, step: int = 10) -> set[int]:
    """Read one epoch shard by shard, everything ordered arriving at once.

    Returns:
        What was evicted before this epoch had come to it.
    """
    too_early: set[int] = set()
    for place, shard in enumerate(order):
        evicted = len(node.evictions)
        node.now_s += 1.0
        node.demand(session, shard)
        node.settle()
        node.release(session, shard)
        node.advance(session, step * (epoch * len(order) + place + 1))
        node.settle()
        too_early |= set(node.evictions[evicted:]) & set(order[place + 1 :])
    return too_early


def two_epochs(*orders: list[int], epoch: int) -> list[tuple[int, int, int]]:
    size = len(orders[0])
    return [
        (10 * (size * (epoch + later) + place), 10 * (size * (epoch + later) + place + 1), shard)
        for later, order in enumerate(orders)
        for place, shard in enumerate(order)
    ]


def test_one_reading_after_the_other_leaves_alone_what_is_to_stay() -> None:
    orders = [np.random.default_rng(seed).permutation(40).tolist() for seed in range(6)]
    node = Node(200, max_fetches=2, lookahead_bytes=20)
    node.open(1, shards(*[10] * 40))
    for epoch in range(5):
        node.follow(1, two_epochs(orders[epoch], orders[epoch + 1], epoch=epoch), clock=10 * 40 * epoch)
        kept = {shard for shard in range(40) if node.planner._horizon.is_kept(key(shard))}
        assert len(kept) >= 40 * 0.5 - 1 - 1, "nothing is set apart for what is fetched ahead"
        fetched = len(node.fetches)
        # Places are traded, but only those of shards that this epoch has read.
        assert not kept & scan(node, 1, orders[epoch], epoch=epoch)
        now_kept = {shard for shard in range(40) if node.planner._horizon.is_kept(key(shard))}
        assert len(now_kept) == len(kept)
        if epoch:
            assert len(node.fetches) - fetched <= 20 + 2 + 1


def test_space_that_nobody_needs_is_filled_in_proportion_to_what_is_read() -> None:
    node = Node(1000, max_fetches=8, lookahead_bytes=10)
    node.open(1, shards(*[10] * 40))
    order = list(range(40))
    node.follow(1, two_epochs(order, order, epoch=0))
    node.settle()
    assert len(node.blobs) == 1, "a session that has read nothing may never read on"
    scan(node, 1, order[:2], epoch=0)
    assert len(node.blobs) == 2 + 1 + 2 * 4, "what it read, the next one, and four for each"
    scan(node, 1, order[2:12], epoch=0)
    assert len(node.blobs) == 40


def test_filling_takes_no_space_that_something_else_has() -> None:
    node = Node(100, resident=[(100 + place, 10) for place in range(6)], lookahead_bytes=10)
    node.open(1, shards(*[10] * 40))
    order = list(range(40))
    node.follow(1, two_epochs(order, order, epoch=0))
    scan(node, 1, order[:2], epoch=0)
    assert len(node.blobs) <= 10
    gone = [shard for shard in node.evictions if shard >= 100]
    assert len(gone) <= 2 + 1, "for what it read and the next one; the eight that may fill the cache would take all six"


def test_lru_mode_ignores_plans() -> None:
    node = Node(100, eviction="lru")
    node.open(1, shards(*[10] * 40))
    node.follow(1, two_epochs(list(range(40)), list(range(40)), epoch=0))
    node.settle()
    assert node.fetches == []
    scan(node, 1, list(range(12)), epoch=0)
    assert node.evictions == [0, 1], "the ones used longest ago, though they are not those needed last"


@pytest.mark.parametrize("seed", range(3))
def test_no_victim_is_needed_sooner_than_what_takes_its_place(seed: int) -> None:
    """For what is fetched ahead; who waits already needs his shard sooner than anybody."""
    generator = np.random.default_rng(seed)
    orders = [[generator.permutation(30).tolist() for _ in range(4)] for _ in range(2)]
    node = Node(150, max_fetches=3, lookahead_bytes=30)
    refs = shards(*[10] * 30)
    for session in range(2):
        node.open(session, refs)
    clocks = [0, 0]

    def next_row(session: int, shard: int, epoch: int) -> int:
        rows = [
            10 * (30 * (epoch + later) + place)
            for later in range(2)
            for place, of in enumerate(orders[session][epoch + later])
            if of == shard
        ]
        return min((row for row in rows if row + 10 > clocks[session]), default=10**9) - clocks[session]

    for epoch in range(2):
        for session in range(2):
            node.follow(session, two_epochs(*orders[session][epoch : epoch + 2], epoch=epoch), clock=300 * epoch)
            clocks[session] = 300 * epoch
        for place in range(30):
            for session in range(2):
                node.now_s += 0.5
                shard = orders[session][epoch][place]
                node.demand(session, shard)
                node.settle()
                node.release(session, shard)
                clocks[session] = 300 * epoch + 10 * (place + 1)
                evicted, fetched = len(node.evictions), len(node.fetches)
                node.advance(session, clocks[session])
                ahead = node.fetches[fetched:]
                for victim in node.evictions[evicted:]:
                    until = min(next_row(one, victim, epoch) for one in range(2))
                    assert all(min(next_row(one, new, epoch) for one in range(2)) < until for new in ahead)
                node.settle()


def test_first_shards_of_the_next_epoch_are_there_before_this_one_ends() -> None:
    orders = [np.random.default_rng(seed).permutation(40).tolist() for seed in range(6)]
    node = Node(200, max_fetches=2, lookahead_bytes=20)
    node.open(1, shards(*[10] * 40))
    for epoch in range(4):
        node.follow(1, two_epochs(orders[epoch], orders[epoch + 1], epoch=epoch), clock=10 * 40 * epoch)
        scan(node, 1, orders[epoch], epoch=epoch)
        assert set(orders[epoch + 1][:2]) <= set(node.blobs)


def test_what_stays_stays_while_workers_of_one_epoch_leave_and_those_of_the_next_come() -> None:
    orders = [np.random.default_rng(seed).permutation(40).tolist() for seed in range(6)]
    node = Node(200, max_fetches=2, lookahead_bytes=20)
    refs = shards(*[10] * 40)
    for epoch in range(4):
        node.open(epoch, refs)
        node.follow(epoch, two_epochs(orders[epoch], orders[epoch + 1], epoch=epoch), clock=10 * 40 * epoch)
        fetched = len(node.fetches)
        kept = {shard for shard in range(40) if node.planner._horizon.is_kept(key(shard))}
        assert not kept & scan(node, epoch, orders[epoch], epoch=epoch)
        if epoch:
            # What was fetched ahead at the edge of an epoch may stay there as well, instead of another.
            assert len(node.fetches) - fetched <= 20 + 2 + 2
        node.close(epoch)
        node.settle()


def test_who_waits_takes_the_place_of_a_shard_that_was_read_and_stays_in_it() -> None:
    orders = [np.random.default_rng(seed).permutation(40).tolist() for seed in range(6)]
    node = Node(200, max_fetches=2, lookahead_bytes=20)
    node.open(1, shards(*[10] * 40))
    for epoch in range(3):
        node.follow(1, two_epochs(orders[epoch], orders[epoch + 1], epoch=epoch), clock=10 * 40 * epoch)
        for place, shard in enumerate(orders[epoch]):
            read = set(orders[epoch][:place])
            waits = shard not in node.blobs
            evicted = len(node.evictions)
            node.now_s += 1.0
            node.demand(1, shard)
            node.settle()
            if waits and epoch and place > 4:
                assert set(node.evictions[evicted:]) <= read
                assert node.planner._horizon.is_kept(key(shard)) or set(node.evictions[evicted:]) == set()
            node.release(1, shard)
            node.advance(1, 10 * (epoch * 40 + place + 1))
        node.settle()
        missing = [
            shard for shard in range(40) if node.planner._horizon.is_kept(key(shard)) and shard not in node.blobs
        ]
        assert len(missing) <= 1, "what gave up its place is not to stay any more"


def test_a_place_of_two_small_shards_holds_a_large_one() -> None:
    sizes = [10] * 20 + [20] * 4
    order = list(range(24))
    node = Node(120, max_fetches=2, lookahead_bytes=0)
    node.open(1, shards(*sizes))
    node.follow(1, two_epochs(order, order, epoch=0))
    assert not scan(node, 1, order, epoch=0)
    assert len(node.fetches) == 24
    assert node.planner.statistics().memory_serves == 0
