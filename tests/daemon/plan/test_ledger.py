from __future__ import annotations

import pytest
from cacheloader_daemon.plan.ledger import Ledger


def test_a_reservation_that_does_not_fit_is_refused() -> None:
    ledger = Ledger(quota_bytes=100, overhead_bytes=10)
    ledger.reserve(90)
    with pytest.raises(AssertionError, match="1 bytes do not fit into 0 free bytes"):
        ledger.reserve(1)


def test_a_blob_larger_than_its_reservation_is_refused() -> None:
    ledger = Ledger(quota_bytes=100, overhead_bytes=0)
    ledger.reserve(50)
    with pytest.raises(AssertionError, match="exceeds its reservation"):
        ledger.commit(50, 51)


def test_an_evicted_blob_counts_until_it_is_gone() -> None:
    ledger = Ledger(quota_bytes=100, overhead_bytes=0)
    ledger.reserve(60)
    ledger.commit(60, 55)
    assert ledger.free_bytes == 45
    ledger.evict(55)
    assert ledger.free_bytes == 45
    ledger.evicted(55)
    assert ledger.free_bytes == 100


def test_a_blob_lost_under_a_lease_counts_until_the_lease_ends() -> None:
    ledger = Ledger(quota_bytes=100, overhead_bytes=0)
    ledger.reserve(60)
    ledger.commit(60, 60)
    ledger.lost_while_leased(60)
    assert ledger.free_bytes == 40
    ledger.closed(60)
    assert ledger.free_bytes == 100


def test_what_was_found_may_exceed_the_quota_and_the_excess_only_shrinks() -> None:
    ledger = Ledger(quota_bytes=100, overhead_bytes=0)
    for _ in range(3):
        ledger.found(50)
    ledger.check()
    assert ledger.free_bytes == -50
    ledger.evict(50)
    ledger.evicted(50)
    ledger.check()
    ledger.resident_bytes += 1
    with pytest.raises(AssertionError, match="under a quota of 100"):
        ledger.check()


def test_overhead_that_grows_shows_as_an_excess_and_not_as_a_defect() -> None:
    ledger = Ledger(quota_bytes=100, overhead_bytes=0)
    ledger.reserve(100)
    ledger.set_overhead(5)
    ledger.check()
    assert ledger.free_bytes == -5
    assert ledger.capacity_bytes == 95
