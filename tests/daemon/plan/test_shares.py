"""Owners of a shared cache: what each is guaranteed, what he may borrow, and who gives back first."""

from __future__ import annotations

import pytest
from cacheloader_daemon.plan.events import ShardRef
from cacheloader_daemon.plan.shares import ShareOptions
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheloader.errors import ConfigError
from tests.daemon.plan.node import Node, key, plan_of

ALICE, BOB = 1, 2
BOBS = 1000
"""Number of Bob's first shard; Alice's begin at 0."""


def refs(start: int, sizes: list[int]) -> list[ShardRef]:
    return [ShardRef(key=key(start + place), reserve_bytes=size) for place, size in enumerate(sizes)]


def node_of(shares: ShareOptions, *, alice: list[int], bob: list[int], quota_bytes: int = 100) -> Node:
    node = Node(quota_bytes, shares=shares)
    node.open(ALICE, refs(0, alice), owner="alice")
    node.open(BOB, refs(BOBS, bob), owner="bob")
    return node


def read(node: Node, session: int, shard: int) -> None:
    """Demand, wait until all is done, release."""
    node.demand(session, shard)
    node.settle()
    number = shard + (BOBS if session == BOB else 0)
    if node.leases[session, number]:
        node.release(session, shard)


_SIZES = st.lists(st.integers(1, 25), min_size=1, max_size=12)
_STEPS = st.lists(st.tuples(st.sampled_from(["demand", "release", "finish", "plan", "advance"]), st.integers(0, 99)))


def follow_steps(node: Node, session: int, num_shards: int, steps: list[tuple[str, int]]) -> None:
    """Whatever a client may do, in any order."""
    clock = 0
    for what, number in steps:
        node.now_s += 0.1
        shard = number % num_shards
        match what:
            case "demand":
                node.demand(session, shard)
            case "release":
                held = [leased for (who, leased), count in node.leases.items() if who == session and count]
                if held:
                    node.release_number(session, held[number % len(held)])
            case "finish":
                for evicting in sorted(node.evicting):
                    node.drop(evicting)
                for fetching in list(node.fetching)[: 1 + number % 3]:
                    node.finish(fetching)
            case "plan":
                order = [(shard + place) % num_shards for place in range(num_shards)]
                node.follow(
                    session, [(clock + row, clock + row + 1, one) for row, one in enumerate(order)], clock=clock
                )
            case _:
                clock += number % 5
                node.advance(session, clock)


@settings(max_examples=60, deadline=None)
@given(alice=st.lists(st.integers(1, 12), min_size=1, max_size=5), bob=_SIZES, steps=_STEPS)
def test_what_an_owner_is_guaranteed_is_never_taken_by_another(
    alice: list[int], bob: list[int], steps: list[tuple[str, int]]
) -> None:
    node = node_of(ShareOptions(guaranteed_bytes={"alice": 60}), alice=alice, bob=bob)
    for shard in range(len(alice)):
        read(node, ALICE, shard)
    assert len(node.granted) == len(alice)
    follow_steps(node, BOB, len(bob), steps)
    assert not [shard for shard in node.evictions if shard < BOBS]
    for shard in range(len(alice)):
        node.demand(ALICE, shard)
        assert node.granted[-1] == (ALICE, shard, True), "hers are still there, however long she was away"


@settings(max_examples=60, deadline=None)
@given(alice=st.lists(st.integers(1, 12), min_size=1, max_size=5), bob=_SIZES, steps=_STEPS)
def test_an_owner_gets_back_what_others_have_borrowed_also_if_they_will_need_it_at_once(
    alice: list[int], bob: list[int], steps: list[tuple[str, int]]
) -> None:
    node = node_of(ShareOptions(guaranteed_bytes={"alice": 60}), alice=alice, bob=bob)
    follow_steps(node, BOB, len(bob), steps)
    node.follow(BOB, [(10**6 + row, 10**6 + row + 1, row) for row in range(len(bob))], clock=10**6)
    for held in [leased for (who, leased), count in node.leases.items() if who == BOB for _ in range(count)]:
        node.release_number(BOB, held)
    node.settle()
    while node.leases.total():
        for who, leased in [held for held, count in node.leases.items() if count]:
            node.release_number(who, leased)
        node.settle()
    for shard in range(len(alice)):
        read(node, ALICE, shard)
        assert node.granted[-1][:2] == (ALICE, shard)
    assert not [served for served in node.from_memory if served[0] == ALICE]


@settings(max_examples=60, deadline=None)
@given(most_bytes=st.integers(25, 70), bob=_SIZES, steps=_STEPS)
def test_an_owner_never_holds_more_than_he_may(most_bytes: int, bob: list[int], steps: list[tuple[str, int]]) -> None:
    node = node_of(ShareOptions(max_bytes={"bob": most_bytes}), alice=[1], bob=bob)
    for number in range(len(steps)):
        follow_steps(node, BOB, len(bob), steps[number : number + 1])
        blobs = sum(size for shard, size in node.blobs.items() if shard not in node.evicting)
        assert blobs + sum(bob[shard - BOBS] for shard in node.fetching) <= most_bytes


def test_borrowed_space_serves_the_borrower_while_nobody_wants_it() -> None:
    node = node_of(ShareOptions(guaranteed_bytes={"alice": 60}), alice=[20] * 3, bob=[20] * 5)
    for shard in range(5):
        read(node, BOB, shard)
    assert not node.evictions
    read(node, ALICE, 0)
    assert node.evictions == [BOBS], "one of his goes for hers, the one used longest ago"


def test_of_two_borrowers_nobody_takes_what_the_other_is_guaranteed() -> None:
    shares = ShareOptions(guaranteed_bytes={"alice": 40, "bob": 40})
    node = node_of(shares, alice=[20] * 6, bob=[20] * 6)
    for shard in (0, 1, 2):
        read(node, ALICE, shard)
        read(node, BOB, shard)
    for shard in (3, 4, 5):
        read(node, ALICE, shard)
    held = [sum(size for shard, size in node.blobs.items() if (shard >= BOBS) == whose) for whose in (False, True)]
    assert held[1] >= 40
    assert sum(held) <= 100


def test_what_no_owner_asked_for_is_given_up_before_anything_guaranteed() -> None:
    """Blobs of an earlier start count for nobody."""
    shares = ShareOptions(guaranteed_bytes={"alice": 100})
    node = Node(100, shares=shares, resident=[(500, 60)])
    node.open(ALICE, refs(0, [30, 30]), owner="alice")
    read(node, ALICE, 0)
    read(node, ALICE, 1)
    assert node.evictions == [500]


def test_a_plan_above_an_owners_own_bound_is_refused_with_that_bound() -> None:
    shares = ShareOptions(guaranteed_bytes={"alice": 60}, max_bytes={"bob": 30})
    node = node_of(shares, alice=[50], bob=[20, 20])
    needed = node.planner.working_set(plan_of(BOB, [(0, 5, 0), (0, 5, 1)]))
    assert not needed.fits
    assert needed.quota_bytes == 30
    assert node.planner.working_set(plan_of(ALICE, [(0, 5, 0)])).fits


def test_an_owner_who_may_hold_less_than_he_is_guaranteed_is_refused() -> None:
    with pytest.raises(ConfigError, match="is guaranteed more"):
        ShareOptions(guaranteed_bytes={"a": 2}, max_bytes={"a": 1})
