from __future__ import annotations

import pytest
from cacheloader_daemon.plan.effects import Evict, Fetch, Grant, Promote, Refuse, ServeFromMemory
from cacheloader_daemon.plan.events import (
    Advanced,
    Demanded,
    Dropped,
    FetchFailed,
    FetchFinished,
    Released,
    SessionOpened,
)
from cacheloader_daemon.plan.machine import Planner
from cacheloader_daemon.plan.options import PlannerOptions
from cacheloader_daemon.plan.states import IllegalEvent

from cacheloader.errors import ConfigError, ProtocolError
from tests.daemon.plan.node import Node, key, plan_of, shards


def test_second_session_that_wants_a_shard_in_flight_joins_its_fetch() -> None:
    node = Node(100)
    for session in (1, 2):
        node.open(session, shards(10))
        node.demand(session, 0)
    assert node.fetches == [0]
    node.finish(0)
    assert node.granted == [(1, 0, False), (2, 0, False)]
    assert node.planner.statistics().coalesced == 1


def test_a_resident_shard_is_granted_at_once_and_counts_as_a_hit() -> None:
    node = Node(100, resident=[(0, 10)])
    node.open(1, shards(10))
    node.demand(1, 0)
    assert node.granted == [(1, 0, True)]
    assert node.fetches == []
    assert node.planner.statistics().hits == 1


def test_without_a_plan_nothing_is_fetched_ahead_and_the_shard_used_longest_ago_goes_first() -> None:
    node = Node(30)
    node.open(1, shards(10, 10, 10, 10))
    for shard in (0, 1, 2, 0):
        node.demand(1, shard)
        node.settle()
        node.release(1, shard)
    node.demand(1, 3)
    assert node.evictions == [1]
    node.settle()
    assert node.fetches == [0, 1, 2, 3]


def test_blobs_of_an_earlier_start_go_in_the_order_of_their_last_use() -> None:
    node = Node(30, resident=[(7, 10), (5, 10), (6, 10)])
    node.open(1, shards(*[10] * 8))
    node.demand(1, 0)
    node.settle()
    node.demand(1, 1)
    assert node.evictions == [7, 5]


def test_prefetch_follows_the_plan_within_the_window() -> None:
    node = Node(1000, lookahead_bytes=30, max_fetches=2)
    node.open(1, shards(*[10] * 6))
    node.follow(1, [(place * 10, place * 10 + 10, 5 - place) for place in range(6)])
    assert node.fetches == [5, 4]
    node.finish(5)
    assert node.fetches == [5, 4, 3]
    node.settle()
    assert node.fetches == [5, 4, 3], "the window is full until a shard of it is used"
    node.demand(1, 5)
    assert node.fetches == [5, 4, 3, 2]


def test_a_shard_larger_than_the_window_is_fetched_ahead_alone() -> None:
    node = Node(1000, lookahead_bytes=15)
    node.open(1, shards(20, 20, 20))
    node.follow(1, [(0, 10, 0), (10, 20, 1), (20, 30, 2)])
    node.settle()
    assert node.fetches == [0]
    node.demand(1, 0)
    assert node.fetches == [0, 1]


def test_the_sooner_next_use_of_two_sessions_is_fetched_first() -> None:
    node = Node(1000, max_fetches=1, lookahead_bytes=1000)
    node.open(1, shards(10, 10, 10))
    node.open(2, shards(10, 10, 10))
    node.follow(1, [(0, 10, 0), (40, 50, 1)])
    node.follow(2, [(30, 40, 2), (50, 60, 1)])
    node.settle()
    assert node.fetches == [0, 2, 1]


def test_a_fast_session_is_served_before_a_slow_one_at_the_same_distance() -> None:
    """1. Both fetch their first shard. 2. Session 2 moves ten times as fast. 3. Its next shard is fetched first."""
    node = Node(10_000, max_fetches=1, lookahead_bytes=20)
    node.open(1, shards(*[10] * 8))
    node.open(2, shards(*[10] * 8))
    node.follow(1, [(0, 200, 0), (200, 400, 1)])
    node.follow(2, [(0, 1000, 2), (1010, 2000, 3)])
    node.settle()
    assert node.fetches == [0, 2]
    for step in range(1, 11):
        node.now_s = float(step)
        node.advance(1, step * 10)
        node.advance(2, step * 100 - 1)
    node.demand(1, 0)
    assert node.fetches == [0, 2, 3], "11 rows at 100 rows/s come before 100 rows at 10 rows/s"


def test_demand_goes_before_prefetch_and_does_not_queue_behind_it() -> None:
    node = Node(1000, max_fetches=2)
    node.open(1, shards(*[10] * 6))
    node.follow(1, [(place, place + 1, place) for place in range(5)])
    assert node.fetches == [0, 1]
    node.demand(1, 5)
    assert node.fetches == [0, 1, 5]
    node.finish(0)
    assert node.fetches == [0, 1, 5], "no further prefetch while as many are in flight as may be"


def test_a_prefetch_that_somebody_waits_for_is_promoted_once() -> None:
    node = Node(1000)
    node.open(1, shards(10))
    node.open(2, shards(10))
    node.follow(1, [(0, 10, 0)])
    assert node.fetching == {0: False}
    node.demand(1, 0)
    node.demand(2, 0)
    assert node.fetching == {0: True}
    assert node.planner.statistics().promoted == 1
    node.settle()
    assert node.granted == [(1, 0, False), (2, 0, False)]


def test_farthest_next_use_is_evicted_first_and_unplanned_blobs_before_it() -> None:
    node = Node(40, lookahead_bytes=0)
    node.open(1, shards(*[10] * 6))
    for shard in range(4):
        node.demand(1, shard)
    node.settle()
    node.follow(1, [(0, 10, 0), (10, 20, 2), (20, 30, 1), (30, 40, 4), (40, 50, 5)])
    for shard in range(4):
        node.release(1, shard)
    node.demand(1, 4)
    assert node.evictions == [3]
    node.settle()
    node.demand(1, 5)
    assert node.evictions == [3, 1]


def test_a_shard_in_use_counts_as_needed_now_although_nobody_leases_it() -> None:
    node = Node(20, lookahead_bytes=0, patience_s=5)
    node.open(1, shards(10, 10, 10))
    node.open(2, shards(10, 10, 10))
    for shard in (0, 1):
        node.demand(1, shard)
    node.settle()
    node.follow(1, [(0, 10, 0), (0, 10, 1)])
    for shard in (0, 1):
        node.release(1, shard)
    node.demand(2, 2)
    assert node.evictions == []
    node.advance(1, 10)
    assert len(node.evictions) == 1


def test_a_leased_blob_is_never_evicted() -> None:
    node = Node(20)
    node.open(1, shards(10, 10, 10))
    node.demand(1, 0)
    node.demand(1, 1)
    node.settle()
    node.release(1, 1)
    node.open(2, shards(10, 10, 10))
    node.demand(2, 2)
    assert node.evictions == [1]


def test_prefetch_does_not_evict_what_is_needed_sooner() -> None:
    node = Node(30, lookahead_bytes=1000)
    node.open(1, shards(*[10] * 4))
    node.follow(1, [(0, 10, 0), (10, 20, 1), (20, 30, 2), (30, 40, 3)])
    node.settle()
    assert sorted(node.blobs) == [0, 1, 2]
    assert node.evictions == []


def test_prefetch_takes_the_place_of_what_nobody_has_announced() -> None:
    node = Node(30, resident=[(7, 10), (8, 10), (9, 10)], lookahead_bytes=20)
    node.open(1, shards(*[10] * 4))
    node.follow(1, [(0, 10, 0), (10, 20, 1), (20, 30, 2), (30, 40, 3)])
    node.settle()
    assert sorted(node.blobs) == [0, 1, 9], "and leaves the rest of it alone beyond the window"


def test_space_that_is_being_freed_is_waited_for_and_not_freed_twice() -> None:
    node = Node(20, resident=[(7, 10), (8, 10)])
    node.open(1, shards(10, 10))
    node.demand(1, 0)
    node.demand(1, 0)
    assert node.evictions == [7]
    assert node.fetches == []
    node.drop(7)
    assert node.fetches == [0]


def test_a_later_small_request_does_not_take_the_space_that_an_earlier_one_waits_for() -> None:
    node = Node(30, resident=[(7, 10), (8, 10)])
    node.open(1, shards(30, 10))
    node.open(2, shards(30, 10))
    node.demand(1, 0)
    node.demand(2, 1)
    assert node.fetches == []
    node.drop(7)
    node.drop(8)
    assert node.fetches == [0]


def test_evictions_for_all_who_wait_go_on_side_by_side() -> None:
    node = Node(30, resident=[(6, 10), (7, 10), (8, 10)], lookahead_bytes=0)
    node.open(1, shards(10, 10, 10))
    for shard in range(3):
        node.demand(1, shard)
    assert node.evictions == [6, 7, 8]


def test_space_freed_for_a_demand_is_not_taken_by_a_prefetch() -> None:
    node = Node(20, resident=[(7, 10), (8, 10)], lookahead_bytes=100)
    node.open(1, shards(20, 10, 10))
    node.demand(1, 0)
    node.follow(1, [(0, 10, 1), (10, 20, 2)])
    node.drop(7)
    assert node.fetches == []
    node.drop(8)
    assert node.fetches == [0]


def test_a_demanded_shard_whose_eviction_never_ends_is_served_from_memory() -> None:
    node = Node(20, resident=[(0, 10), (1, 10)], patience_s=5)
    node.open(1, shards(10, 10, 10))
    node.demand(1, 2)
    node.demand(1, 0)
    assert node.planner.wake_at_s == 5.0
    node.now_s = 5.0
    node.wake()
    assert node.from_memory == [(1, 2), (1, 0)]
    assert node.planner.wake_at_s is None


def test_a_demanded_shard_that_is_being_evicted_is_fetched_again() -> None:
    node = Node(20, resident=[(0, 10), (1, 10)])
    node.open(1, shards(10, 10, 10))
    node.demand(1, 2)
    assert node.evictions == [0]
    node.demand(1, 0)
    node.settle()
    assert node.from_memory == []
    assert [(shard, hit) for _, shard, hit in node.granted] == [(2, False), (0, False)]


def test_a_shard_larger_than_the_cache_is_served_from_memory_at_once() -> None:
    node = Node(100, overhead_bytes=20)
    node.open(1, shards(81, 80))
    node.demand(1, 0)
    assert node.from_memory == [(1, 0)]
    node.demand(1, 1)
    assert node.fetches == [1]


def test_when_everybody_waits_for_everybody_else_one_is_served_from_memory() -> None:
    """1. Two sessions lease half the cache each. 2. Each wants one shard more. 3. One of them gets it from memory."""
    node = Node(20)
    for session in (1, 2):
        node.open(session, shards(*[10] * 4))
    node.demand(1, 0)
    node.demand(2, 1)
    node.settle()
    node.demand(1, 2)
    assert node.waiting, "session 2 waits for nothing and may give back its lease"
    node.demand(2, 3)
    assert node.from_memory == [(1, 2)]
    assert node.waiting, "session 1 can go on now, and session 2 waits for it"
    node.release(1, 0)
    node.settle()
    assert node.granted[-1] == (2, 3, False)


def test_a_session_that_waits_for_itself_is_served_from_memory_at_once() -> None:
    node = Node(20)
    node.open(1, shards(*[10] * 3))
    node.demand(1, 0)
    node.demand(1, 1)
    node.settle()
    node.demand(1, 2)
    assert node.from_memory == [(1, 2)]


def test_patience_ends_without_any_event() -> None:
    node = Node(20, patience_s=5)
    node.open(1, shards(20, 10))
    node.open(2, shards(20, 10))
    node.demand(1, 0)
    node.settle()
    node.now_s = 100.0
    node.advance(1, 1)
    node.demand(2, 1)
    assert node.planner.wake_at_s == 105.0
    node.now_s = 104.9
    node.wake()
    assert node.from_memory == []
    node.now_s = 105.0
    node.wake()
    assert node.from_memory == [(2, 1)]
    assert node.planner.wake_at_s is None


def test_patience_ends_at_the_very_time_of_the_alarm_however_it_rounds() -> None:
    for tenths in range(1, 200):
        node = Node(20, patience_s=5)
        node.open(1, shards(20, 10))
        node.open(2, shards(20, 10))
        node.demand(1, 0)
        node.settle()
        node.now_s = tenths / 10
        node.advance(1, 1)
        node.demand(2, 1)
        assert node.planner.wake_at_s is not None
        node.now_s = node.planner.wake_at_s
        node.wake()
        assert node.from_memory == [(2, 1)]


def test_a_silent_session_is_not_waited_for() -> None:
    node = Node(20, patience_s=5)
    node.open(1, shards(20, 10))
    node.open(2, shards(20, 10))
    node.demand(1, 0)
    node.settle()
    node.now_s = 60.0
    node.demand(2, 1)
    assert node.from_memory == [(2, 1)]


def test_what_an_idle_session_may_need_again_gives_way_to_one_that_waits() -> None:
    """1. Session 1 holds the cache with its window and falls silent. 2. A minute later session 2 gets the space."""
    node = Node(20)
    node.open(1, shards(10, 10, 10))
    node.open(2, shards(10, 10, 10))
    node.follow(1, [(0, 10, 0), (0, 10, 1)])
    node.settle()
    node.now_s = 30.0
    node.demand(2, 2)
    assert node.from_memory == [(2, 2)]
    node.now_s = 61.0
    node.demand(2, 2)
    assert len(node.evictions) == 1
    node.settle()
    assert node.granted == [(2, 2, False)]


def test_a_session_with_long_steps_keeps_the_shards_of_its_window() -> None:
    """1. Session 1 moves once in two minutes. 2. After one of them it is not taken for idle."""
    node = Node(20, lookahead_bytes=0)
    node.open(1, shards(10, 10, 10))
    node.open(2, shards(10, 10, 10))
    node.follow(1, [(0, 99, 0), (0, 99, 1)])
    for shard in (0, 1):
        node.demand(1, shard)
    node.settle()
    for shard in (0, 1):
        node.release(1, shard)
    for step in range(1, 4):
        node.now_s = step * 120.0
        node.advance(1, step)
    node.now_s += 61.0
    node.demand(2, 2)
    assert node.evictions == []
    assert node.from_memory == [(2, 2)]


def test_small_requests_do_not_keep_a_large_one_out() -> None:
    node = Node(30)
    node.open(1, shards(20, 10, 10))
    node.open(2, shards(20, 10, 10))
    node.open(3, shards(20, 10, 10))
    node.demand(1, 1)
    node.demand(1, 2)
    node.settle()
    node.demand(2, 0)
    node.demand(3, 2)
    node.release(1, 2)
    node.release(1, 1)
    assert node.granted[-1] == (3, 2, True), "a hit takes no space"
    node.settle()
    assert (2, 0, False) in node.granted


def test_a_failed_demand_is_refused_and_not_tried_again_by_a_prefetch_at_once() -> None:
    node = Node(100)
    node.open(1, shards(10, 10))
    node.follow(1, [(0, 10, 0)])
    node.demand(1, 0)
    node.fail(0, disk=False)
    assert node.refused == [(1, 0)]
    assert node.fetches == [0]
    node.demand(1, 0)
    assert node.fetches == [0, 0], "somebody who asks again is told anew"


def test_a_failed_prefetch_rests_twice_as_long_after_each_failure() -> None:
    node = Node(100)
    node.open(1, shards(10))
    node.follow(1, [(100, 110, 0)])
    for turn, rest_s in enumerate((5, 10, 20, 40)):
        assert len(node.fetches) == turn + 1
        node.fail(0, disk=False)
        node.now_s += rest_s - 0.1
        node.advance(1, 2 * turn + 1)
        assert len(node.fetches) == turn + 1
        node.now_s += 0.2
        node.advance(1, 2 * turn + 2)
    assert node.refused == []


def test_where_the_disk_fails_those_who_wait_are_served_from_memory_and_prefetch_rests() -> None:
    node = Node(100, max_fetches=1)
    node.open(1, shards(10, 10, 10))
    node.follow(1, [(0, 10, 0), (10, 20, 1), (20, 30, 2)])
    node.demand(1, 0)
    node.fail(0, disk=True)
    assert node.from_memory == [(1, 0)]
    assert node.fetches == [0]
    node.demand(1, 1)
    assert node.fetches == [0, 1], "a demand tries the disk again"


def test_a_closed_session_frees_its_leases_requests_and_plan() -> None:
    node = Node(20)
    node.open(1, shards(*[10] * 4))
    node.open(2, shards(*[10] * 4))
    node.follow(1, [(0, 10, 0), (10, 20, 1), (20, 30, 2)])
    node.settle()
    node.demand(1, 0)
    node.demand(1, 3)
    node.close(1)
    node.settle()
    statistics = node.planner.statistics()
    assert (statistics.waiting_requests, statistics.leased_shards, statistics.sessions) == (0, 0, 1)
    node.demand(2, 2)
    node.settle()
    assert node.granted[-1] == (2, 2, False)


def test_a_request_of_a_closed_session_is_not_answered_when_its_fetch_ends() -> None:
    node = Node(20)
    node.open(1, shards(10))
    node.demand(1, 0)
    node.close(1)
    node.refs[9] = shards(10)
    node.finish(0)
    assert node.granted == []
    assert node.planner.statistics().resident_shards == 1


def test_a_blob_lost_under_a_lease_counts_until_the_lease_ends_and_is_served_from_memory_meanwhile() -> None:
    node = Node(20)
    node.open(1, shards(10, 20))
    node.open(2, shards(10, 20))
    node.demand(1, 0)
    node.settle()
    node.lose(0)
    assert node.planner.statistics().unlinked_bytes == 10
    node.demand(2, 0)
    assert node.from_memory == [(2, 0)]
    node.demand(2, 1)
    assert node.fetches == [0]
    node.release(1, 0)
    assert node.fetches == [0, 1]


def test_a_grant_of_a_damaged_blob_can_be_taken_back() -> None:
    """1. Granted. 2. The runtime finds the blob damaged: released, dropped, demanded again. 3. It is fetched."""
    node = Node(20, resident=[(0, 10)])
    node.open(1, shards(10))
    node.demand(1, 0)
    node.release(1, 0)
    node.lose(0)
    node.demand(1, 0)
    node.settle()
    assert node.granted == [(1, 0, True), (1, 0, False)]
    assert node.planner.statistics().lost_blobs == 1


def test_a_smaller_quota_than_at_the_last_start_is_reached_by_eviction() -> None:
    node = Node(30, resident=[(place, 10) for place in range(5)])
    node.open(1, shards(10))
    assert node.evictions == [0, 1]
    node.settle()
    assert node.disk_bytes == 30


def test_overhead_that_grows_makes_blobs_give_way() -> None:
    node = Node(30, resident=[(place, 10) for place in range(3)])
    node.open(1, shards(10))
    node.planner.set_overhead(11)
    node.advance(1, 1)
    assert node.evictions == [0, 1]


def test_unused_rest_of_a_reservation_is_free_again() -> None:
    node = Node(20)
    node.open(1, shards(20, 12))
    node.demand(1, 0)
    node.finish(0, used_bytes=8)
    node.demand(1, 1)
    assert node.fetches == [0, 1]


def test_a_new_plan_replaces_the_old_one() -> None:
    node = Node(1000, max_fetches=1)
    node.open(1, shards(10, 10, 10))
    node.follow(1, [(0, 10, 0), (10, 20, 1)])
    node.follow(1, [(100, 110, 2)], clock=100)
    node.settle()
    assert node.fetches == [0, 2]


def test_what_was_fetched_ahead_for_a_plan_that_is_gone_does_not_fill_the_window() -> None:
    node = Node(1000, lookahead_bytes=20)
    node.open(1, shards(*[10] * 4))
    node.follow(1, [(0, 10, 0), (10, 20, 1)])
    node.settle()
    assert node.planner.statistics().ahead_bytes == 20
    node.follow(1, [(100, 110, 2), (110, 120, 3)], clock=100)
    node.settle()
    assert node.fetches == [0, 1, 2, 3]


def test_a_row_that_was_reported_before_moves_nothing() -> None:
    node = Node(100)
    node.open(1, shards(10))
    node.follow(1, [(0, 10, 0)])
    node.advance(1, 8)
    node.advance(1, 3)
    node.advance(1, 8)
    node.demand(1, 0)
    node.settle()
    assert node.granted == [(1, 0, False)]


def test_working_set_names_the_arithmetic_before_the_plan_is_followed() -> None:
    node = Node(64 * 2**20, overhead_bytes=2**20)
    node.open(1, shards(*[32 * 2**20] * 4))
    fits = plan_of(1, [(0, 10, 0), (10, 20, 1)])
    growth_bytes = 2**17
    too_large = plan_of(1, [(0, 10, 0), (5, 15, 1), (5, 20, 2)])
    assert node.planner.working_set(fits).fits
    needed = node.planner.working_set(too_large)
    assert not needed.fits
    assert (needed.peak_bytes, needed.peak_clock, needed.num_shards) == (96 * 2**20, 5, 3)
    assert "may hold 64.0 MiB and this data set needs 97.1 MiB at once: 3 shards" in needed.shortfall
    assert f"at least {97 * 2**20 + 2 * growth_bytes} bytes" in needed.shortfall
    assert node.fetches == []


def test_a_malformed_plan_leaves_the_old_one_in_force() -> None:
    node = Node(100, max_fetches=1)
    node.open(1, shards(10, 10))
    node.follow(1, [(0, 10, 0), (10, 20, 1)])
    with pytest.raises(ProtocolError):
        node.follow(1, [(0, 10, 7)])
    node.settle()
    assert node.fetches == [0, 1]


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Advanced(session=9, clock=1), "session 9 is not open"),
        (Demanded(session=1, request=1, shard=4), "shard 4 of a data set of 2 shards"),
        (Demanded(session=1, request=77, shard=1), "waits as request 77 already"),
        (Released(session=1, shard=1), "released a lease that it does not hold"),
        (FetchFinished(key=key(1), used_bytes=10), "finished that was not ordered"),
        (FetchFinished(key=key(0), used_bytes=11), "takes 11 bytes and 10 were reserved"),
        (FetchFailed(key=key(1), disk=False), "failed that was not ordered"),
        (Dropped(key=key(0)), "dropped that is not there"),
        (plan_of(1, [], clock=-1), "from row -1"),
    ],
)
def test_an_event_that_cannot_have_happened_changes_nothing(event: object, says: str) -> None:
    node = Node(100)
    node.open(1, shards(10, 10))
    node.planner.handle(Demanded(session=1, request=77, shard=0), 0.0)
    before = node.planner.statistics()
    with pytest.raises(IllegalEvent, match=says):
        node.planner.handle(event, 0.0)  # type: ignore[arg-type]
    assert node.planner.statistics() == before
    node.planner.check_invariants()


def test_an_illegal_event_tells_the_story_of_its_shard() -> None:
    planner = Planner(PlannerOptions(quota_bytes=100))
    planner.handle(SessionOpened(session=1, shards=shards(10)), 0.5)
    planner.handle(Demanded(session=1, request=1, shard=0), 1.25)
    planner.handle(FetchFinished(key=key(0), used_bytes=10), 2.5)
    with pytest.raises(IllegalEvent) as caught:
        planner.handle(FetchFinished(key=key(0), used_bytes=10), 3.0)
    story = str(caught.value)
    assert "is resident" in story
    assert "1.250 s: absent -> wanted (demanded); 1.250 s: wanted -> fetching (demand fetch started)" in story
    assert "2.500 s: leased to session 1" in story


def test_effects_of_one_event_come_in_an_order_that_can_be_carried_out() -> None:
    planner = Planner(PlannerOptions(quota_bytes=20, max_fetches=4, lookahead_bytes=20))
    for session in (1, 2):
        planner.handle(SessionOpened(session=session, shards=shards(10, 10, 10)), 0.0)
    assert planner.handle(plan_of(1, [(0, 10, 0), (10, 20, 1)]), 0.0) == [
        Fetch(key=key(0), demand=False),
        Fetch(key=key(1), demand=False),
    ]
    assert planner.handle(Demanded(session=1, request=5, shard=0), 0.0) == [Promote(key=key(0))]
    assert planner.handle(FetchFinished(key=key(0), used_bytes=10), 0.0) == [
        Grant(session=1, request=5, key=key(0), hit=False)
    ]
    assert planner.handle(FetchFinished(key=key(1), used_bytes=10), 0.0) == []
    assert planner.handle(Demanded(session=2, request=5, shard=2), 0.0) == [Evict(key=key(1))]
    assert planner.handle(Dropped(key=key(1)), 0.0) == [Fetch(key=key(2), demand=True)]
    assert planner.handle(FetchFailed(key=key(2), disk=True), 0.0) == [
        ServeFromMemory(session=2, request=5, key=key(2))
    ]
    assert planner.handle(Demanded(session=2, request=6, shard=2), 0.0) == [Fetch(key=key(2), demand=True)]
    assert planner.handle(FetchFailed(key=key(2), disk=False), 0.0) == [Refuse(session=2, request=6, key=key(2))]


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="quota_bytes=0 is below 1"):
        PlannerOptions(quota_bytes=0)
    with pytest.raises(ConfigError, match="max_fetches=0"):
        PlannerOptions(quota_bytes=1, max_fetches=0)
    with pytest.raises(ConfigError, match="lookahead_bytes=-1 is negative"):
        PlannerOptions(quota_bytes=1, lookahead_bytes=-1)


def test_default_window_keeps_the_fetches_busy_and_holds_a_window_of_each_plan() -> None:
    node = Node(10_000, max_fetches=2)
    node.open(1, shards(*[10] * 40))
    assert node.planner.statistics().lookahead_bytes == 8 * 2 * 10
    node.follow(1, [(0, 10, shard) for shard in range(20)])
    assert node.planner.statistics().lookahead_bytes == 200
    node.open(2, node.refs[1])
    node.follow(2, [(0, 10, shard) for shard in range(20)])
    assert node.planner.statistics().lookahead_bytes == 200, "equal plans are one"
