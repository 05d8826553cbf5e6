"""The peer dies: where a session goes, and when it comes back."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest

from cacheloader.errors import CacheUnusable, DaemonUnavailable, OriginDenied
from cacheloader.protocol import messages
from cacheloader.transport import homecoming, resilient
from cacheloader.transport.daemon import DaemonTransport
from cacheloader.transport.endpoint import SharedDaemon
from cacheloader.transport.open import open_transport
from cacheloader.transport.resilient import Route
from tests.support.waiting import wait_until
from tests.transport.scripted_peer import SHARDS, ScriptedPeer
from tests.transport.test_session import SPEC, URIS, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cacheloader.config import TransportOptions

    NewSession = Callable[..., DaemonTransport]


@pytest.fixture
def other(tmp_path) -> Iterator[ScriptedPeer]:
    """What stands in for the helper process: it can serve the same shards."""
    with ScriptedPeer(tmp_path / "other.sock") as running:
        yield running


@pytest.fixture
def new_session(peer, other, options: Callable[..., TransportOptions], monkeypatch) -> Iterator[NewSession]:
    """Sessions that soon give up a peer that nobody listens for, and wait long for one that is there."""
    monkeypatch.setattr(resilient, "_LEAST_WAIT_S", 60.0)
    made: list[DaemonTransport] = []

    def make(*, home_patience_s: float = 0.3, substitute_patience_s: float = 60.0) -> DaemonTransport:
        def route() -> Route:
            return Route(
                home=SharedDaemon(peer.path, patience_s=home_patience_s),
                substitute=SharedDaemon(other.path, patience_s=substitute_patience_s),
                options=options(),
            )

        made.append(DaemonTransport(route, timeout_s=60))
        return made[-1]

    yield make
    for session in made:
        session.close()


@pytest.fixture
def session(new_session: NewSession) -> DaemonTransport:
    return new_session()


def read(session: DaemonTransport, shard: int) -> None:
    lease = session.acquire(shard)
    assert lease.read(0, lease.size_bytes) == SHARDS[URIS[shard]]
    lease.release()


def test_broken_connection_is_made_again_with_data_set_plan_and_clock(peer, other, session, caplog):
    session.open_dataset(SPEC)
    session.follow(plan(0, 1, 2))
    held = session.acquire(0)
    session.advance(5)
    peer.drop()
    session.advance(6)
    assert held.read(0, 3) == b"AAA"
    read(session, 1)
    session.advance(7)
    read(session, 2)
    held.release()
    opened = peer.requests(messages.OpenDataset)
    assert [request.digest for request in opened] == ["", peer.manifest.digest]
    assert [request.clock for request in peer.requests(messages.FollowPlan)] == [0, 6]
    statistics = session.statistics()
    assert (statistics.acquires, statistics.route.reconnects, statistics.route.fallbacks) == (3, 1, 0)
    assert other.num_connections == 0
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    # What was lent on the broken connection is not given back on the new one.
    peer.wait_for(messages.Release, 2)
    assert peer.requests(messages.Release) == [messages.Release(shard=1), messages.Release(shard=2)]


def test_daemon_that_restarts_within_its_time_is_waited_for(peer, other, session):
    session.open_dataset(SPEC)
    peer.stop()
    peer.start()
    read(session, 1)
    assert other.num_connections == 0


def test_leases_outlive_the_daemon_and_releasing_them_says_nothing(peer, session):
    session.open_dataset(SPEC)
    lease = session.acquire(3)
    peer.stop()
    session.advance(1)
    assert lease.read(0, lease.size_bytes) == SHARDS[URIS[3]]
    lease.release()
    session.advance(2)


def test_lost_daemon_is_replaced_until_it_is_back(peer, other, session, caplog):
    session.open_dataset(SPEC)
    session.follow(plan(0, 1, 2))
    session.advance(4)
    peer.stop()
    started = time.monotonic()
    read(session, 1)
    assert time.monotonic() - started < 20
    read(session, 2)
    assert session.statistics().route.is_away
    assert other.requests(messages.FollowPlan)[0].clock == 4
    assert other.requests(messages.OpenDataset)[0].digest == peer.manifest.digest
    peer.start()

    def is_home() -> bool:
        read(session, 3)
        return not session.statistics().route.is_away

    wait_until(is_home, timeout_s=60)
    route = session.statistics().route
    assert (route.fallbacks, route.returns) == (1, 1)
    assert len(peer.requests(messages.FollowPlan)) == 2
    assert len([record for record in caplog.records if "reads the origin" in record.message]) == 1


def test_session_stays_away_while_the_daemon_is_still_opening_the_data_set(peer, other, session):
    session.open_dataset(SPEC)
    peer.stop()
    read(session, 1)
    waiting = []
    peer.on[messages.OpenDataset] = lambda peer, sock, request: waiting.append((sock, request))
    peer.start()
    wait_until(lambda: read(session, 2) or bool(waiting))
    read(session, 3)
    assert session.statistics().route.is_away
    peer._answer(*waiting[0])
    wait_until(lambda: read(session, 0) or not session.statistics().route.is_away)
    read(session, 1)
    assert len(waiting) == 1


def test_daemon_that_needs_long_to_open_the_data_set_again_does_not_stop_the_reading(peer, other, session, monkeypatch):
    session.open_dataset(SPEC)
    waiting = []

    def greet(peer, sock, request):
        monkeypatch.setattr(resilient, "_LEAST_WAIT_S", 1.0)  # for what comes next: the greeting has all its time
        peer._answer(sock, request)

    peer.on[messages.Hello] = greet
    peer.on[messages.OpenDataset] = lambda peer, sock, request: waiting.append((sock, request))
    peer.drop()
    started = time.monotonic()
    read(session, 1)
    assert time.monotonic() - started < 20
    assert session.statistics().route.is_away
    wait_until(lambda: bool(waiting))
    peer._answer(*waiting[0])
    wait_until(lambda: read(session, 0) or not session.statistics().route.is_away)


def test_daemon_that_dies_of_a_shard_is_left_alone_for_a_while(peer, other, session):
    session.open_dataset(SPEC)
    peer.on[messages.Acquire] = lambda peer, sock, request: peer.drop()
    read(session, 1)
    assert session.statistics().route.is_away
    assert len(peer.requests(messages.Acquire)) == 2
    assert len(other.requests(messages.Acquire)) == 1


def test_daemon_whose_cache_broke_is_left_for_the_origin(peer, other, session):
    session.open_dataset(SPEC)
    peer.on[messages.Acquire] = lambda peer, sock, request: peer.say(
        sock, messages.Failed(id=request.id, kind="CacheUnusable", message="the disk is gone")
    )
    read(session, 1)
    assert session.statistics().route.is_away


def test_error_of_the_origin_is_not_a_reason_to_go_elsewhere(peer, other, session):
    session.open_dataset(SPEC)
    peer.on[messages.Acquire] = lambda peer, sock, request: peer.say(
        sock, messages.Failed(id=request.id, kind="OriginDenied", message="no", uri=URIS[1])
    )
    with pytest.raises(OriginDenied):
        session.acquire(1)
    assert other.num_connections == 0


def test_daemon_that_leaves_while_one_waits_is_replaced(peer, other, session):
    session.open_dataset(SPEC)

    def leave(peer, sock, request):
        peer.say(sock, messages.Failed(id=request.id, kind="DaemonUnavailable", message="stopping"))
        peer.on.clear()

    peer.on[messages.Acquire] = leave
    read(session, 1)
    assert session.statistics().route.reconnects == 1


def test_substitute_that_dies_too_is_replaced_by_home(peer, other, session):
    session.open_dataset(SPEC)
    peer.stop()
    read(session, 1)
    other.stop()
    peer.start()
    read(session, 2)
    assert not session.statistics().route.is_away


def test_nobody_left_is_an_error_within_seconds(peer, other, new_session):
    session = new_session(substitute_patience_s=0.3)
    session.open_dataset(SPEC)
    peer.stop()
    other.stop()
    started = time.monotonic()
    with pytest.raises(DaemonUnavailable, match=r"other\.sock"):
        session.acquire(0)
    assert time.monotonic() - started < 20
    session.advance(3)


def test_first_opening_never_goes_elsewhere(peer, other, session):
    peer.stop()
    started = time.monotonic()
    with pytest.raises(DaemonUnavailable, match=r"peer\.sock.*nobody listens.*daemon="):
        session.open_dataset(SPEC)
    assert time.monotonic() - started < 20
    assert other.num_connections == 0


def test_worker_whose_daemon_is_lost_before_it_starts_goes_elsewhere(peer, other, session):
    peer.stop()
    manifest = session.open_dataset(SPEC, digest=other.manifest.digest)
    assert manifest.digest == peer.manifest.digest
    read(session, 0)
    assert session.statistics().route.is_away


def test_wrong_socket_path_says_how_to_go_on(options, tmp_path):
    session = open_transport(options(daemon=f"unix://{tmp_path}/wrong.sock", fallback_after_s=0.1))
    with pytest.raises(DaemonUnavailable, match=r"wrong\.sock.*no such socket.*leave daemon="):
        session.open_dataset(SPEC)
    session.close()


def test_refusal_at_home_while_away_is_no_error(peer, other, session):
    session.open_dataset(SPEC)
    peer.stop()
    read(session, 1)
    peer.on[messages.OpenDataset] = lambda peer, sock, request: peer.say(
        sock, messages.Failed(id=request.id, kind="OriginDenied", message="not here")
    )
    peer.start()
    wait_until(lambda: read(session, 2) or bool(peer.requests(messages.OpenDataset)[1:]))
    read(session, 3)
    assert session.statistics().route.is_away


class _Broken:
    """An endpoint that cannot be had, whatever one tries."""

    name = "a broken daemon"
    is_private = True
    greets_late = False
    launch_s = patience_s = longest_pause_s = 1.0

    def __init__(self) -> None:
        self.attempts = 0

    def connect(self, *, deadline, manifest):
        self.attempts += 1
        raise CacheUnusable("the disk is full")

    def check(self, welcome):
        raise AssertionError

    def close(self):
        pass


def test_daemon_that_cannot_be_started_is_not_tried_again_and_again(other, options, monkeypatch):
    monkeypatch.setattr(homecoming, "_FIRST_LOOK_AFTER_S", 600.0)
    broken = _Broken()
    session = DaemonTransport(
        lambda: Route(home=broken, substitute=SharedDaemon(other.path, patience_s=60), options=options()), timeout_s=60
    )
    with pytest.raises(CacheUnusable):
        session.open_dataset(SPEC)
    assert broken.attempts == 1
    session.open_dataset(SPEC, digest=other.manifest.digest)
    assert broken.attempts == 2
    for shard in (0, 1, 2, 3):
        read(session, shard)
    assert broken.attempts == 2
    session.close()
