"""One session and one peer: what is said, what is waited for, what is given back."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cacheloader.errors import (
    ConfigError,
    DaemonUnavailable,
    DeadlineExceeded,
    OriginNotFound,
    ProtocolError,
    StateMismatch,
)
from cacheloader.protocol import frames, messages
from cacheloader.transport import link as link_module
from cacheloader.transport import opening as opening_module
from cacheloader.transport.base import AccessPlan
from cacheloader.transport.daemon import DaemonTransport
from cacheloader.transport.endpoint import SharedDaemon
from cacheloader.transport.open import open_transport
from cacheloader.transport.resilient import Route
from tests.support.descriptors import links_of
from tests.support.patience import patient_enough
from tests.support.waiting import wait_until
from tests.transport.clock import Clock
from tests.transport.scripted_peer import SHARDS, ScriptedPeer, index_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cacheloader.config import TransportOptions

SPEC = messages.DatasetSpec(urls=["mem://s/"])
URIS = list(SHARDS)


def plan(*shards: int, clock: int = 0) -> AccessPlan:
    first = np.arange(len(shards), dtype=np.int64) * 10
    return AccessPlan(first_clock=first, stop_clock=first + 10, shard=np.asarray(shards, dtype=np.int32), clock=clock)


@pytest.fixture
def session(peer, options) -> Iterator[DaemonTransport]:
    session = open_transport(options())
    assert isinstance(session, DaemonTransport)
    yield session
    session.close()


@pytest.fixture
def hurried(peer, options: Callable[..., TransportOptions]) -> Iterator[Callable[[float], DaemonTransport]]:
    """Sessions that have opened their data set, with all the time for that, and wait only so long for a shard."""
    made: list[DaemonTransport] = []

    def make(timeout_s: float) -> DaemonTransport:
        def route() -> Route:
            return Route(home=SharedDaemon(peer.path, patience_s=60), substitute=None, options=options())

        made.append(DaemonTransport(route, timeout_s=timeout_s))
        made[-1].open_dataset(SPEC)
        return made[-1]

    yield make
    for session in made:
        session.close()


def test_nothing_is_connected_before_it_is_needed(peer, session):
    assert peer.num_connections == 0
    session.close()
    assert peer.num_connections == 0


def test_opening_gives_the_manifest(peer, session):
    manifest = session.open_dataset(SPEC)
    assert manifest.digest == peer.manifest.digest
    assert [manifest.uri(shard) for shard in range(len(manifest))] == URIS
    assert peer.requests(messages.OpenDataset) == [messages.OpenDataset(id=1, digest="")]


def test_relative_paths_are_sent_as_this_process_sees_them(peer, session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session.open_dataset(messages.DatasetSpec(urls=["data/", "~/x.tar", "/abs.tar", "s3://b/{0..1}.tar"]))
    spec = frames.decode_spec(peer.payloads[1])
    assert spec.urls == [f"{tmp_path}/data/", f"{tmp_path}/x.tar", "/abs.tar", "s3://b/{0..1}.tar"]


def test_relative_paths_mean_the_same_after_the_process_has_moved(peer, session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session.open_dataset(messages.DatasetSpec(urls=["data/"]))
    monkeypatch.chdir("/")
    peer.drop()
    session.acquire(0)
    specs = [frames.decode_spec(payload) for payload in peer.payloads if b"data/" in payload]
    assert [spec.urls for spec in specs] == [[f"{tmp_path}/data/"]] * 2


def test_credentials_in_the_environment_never_go_to_a_shared_daemon(peer, session, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    session.open_dataset(messages.DatasetSpec(urls=["mem://s/"], environment={"AWS_PROFILE": "mine"}))
    assert frames.decode_spec(peer.payloads[1]).environment == {}
    assert not any(b"hush" in payload for payload in peer.payloads)


def test_credentials_in_the_environment_go_to_a_private_daemon(peer, options, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("SECRET_OF_ANOTHER_PROGRAM", "hush")
    home = SharedDaemon(peer.path, patience_s=60)
    home.is_private = True
    session = DaemonTransport(lambda: Route(home=home, substitute=None, options=options()), timeout_s=60)
    session.open_dataset(SPEC)
    environment = frames.decode_spec(peer.payloads[1]).environment
    assert environment["AWS_SECRET_ACCESS_KEY"] == "hush"
    assert "SECRET_OF_ANOTHER_PROGRAM" not in environment
    session.close()


def test_storage_option_that_cannot_travel_is_named_without_its_value(peer, session):
    spec = messages.DatasetSpec(urls=["s3://b/"], storage_options={"anon": True, "session": object()})
    with pytest.raises(ConfigError, match=r"storage_options\['session'\]"):
        session.open_dataset(spec)


def test_no_url_at_all_is_an_error(session):
    with pytest.raises(ConfigError, match="urls is empty"):
        session.open_dataset(messages.DatasetSpec(urls=[]))


def test_another_digest_than_the_expected_one_is_a_mismatch(peer, session):
    with pytest.raises(StateMismatch, match=peer.manifest.digest):
        session.open_dataset(SPEC, digest="0" * 32)


def test_manifest_that_is_not_what_its_digest_says_is_refused(peer, session):
    peer.on[messages.OpenDataset] = lambda peer, sock, request: peer.say(
        sock, messages.DatasetReady(id=request.id, digest="f" * 32), bytes(peer.manifest.to_bytes())
    )
    with pytest.raises(ProtocolError, match="f" * 32):
        session.open_dataset(SPEC)


def test_progress_is_reported_and_extends_the_wait(peer, options, monkeypatch):
    clock = Clock()
    for module in (link_module, opening_module):
        monkeypatch.setattr(module, "time", clock)
    seen = []

    def slowly(peer, sock, request):
        for done in range(8):
            wait_until(lambda done=done: len(seen) == done)
            clock.ahead_s += 40.0
            peer.say(sock, messages.Progress(id=request.id, stage="counting", done=done, total=8))
        peer._answer(sock, request)

    peer.on[messages.OpenDataset] = slowly
    session = open_transport(options(timeout_s=60.0))
    session.open_dataset(SPEC, progress=lambda *news: seen.append(news))
    assert seen == [("counting", done, 8) for done in range(8)]
    session.close()


def test_silence_while_opening_ends_in_an_error_with_the_last_news(peer, options):
    peer.on[messages.OpenDataset] = lambda peer, sock, request: peer.say(
        sock, messages.Progress(id=request.id, stage="listing", done=3, total=0)
    )

    def open_within(timeout_s: float) -> str:
        session = open_transport(options(timeout_s=timeout_s))
        with pytest.raises(DeadlineExceeded) as caught:
            session.open_dataset(SPEC)
        session.close()
        assert f"{timeout_s:g} s" in caught.value.message
        return caught.value.message

    message = patient_enough(open_within, is_early=lambda message: "it said nothing" in message)
    assert re.search(r"mem://s/ .*peer\.sock.*listing, 3 of an unknown number", message)


def test_lease_reads_what_the_peer_lent_and_is_given_back(peer, session):
    session.open_dataset(SPEC)
    lease = session.acquire(2)
    assert lease.read(0, lease.size_bytes) == SHARDS[URIS[2]]
    assert (lease.index, lease.source, lease.uri) == (index_of(URIS[2]), "nvme", URIS[2])
    lease.release()
    lease.release()
    peer.wait_for(messages.Release)
    session.acquire(0)
    assert peer.requests(messages.Release)[0] == messages.Release(shard=2)


def test_plan_travels_as_three_arrays(peer, session):
    session.open_dataset(SPEC)
    session.follow(plan(3, 1, 3, clock=7))
    request = peer.requests(messages.FollowPlan)[0]
    assert (request.num_accesses, request.clock) == (3, 7)
    block = peer.payloads[peer.received.index(request)]
    assert np.frombuffer(block, "<i8", 6).tolist() == [0, 10, 20, 10, 20, 30]
    assert np.frombuffer(block, "<i4", 3, 48).tolist() == [3, 1, 3]


def test_shard_that_does_not_come_is_an_error_that_names_shard_source_and_last_news(peer, hurried):
    def never(peer, sock, request):
        peer.say(sock, messages.Progress(id=request.id, stage="retrying after 503", done=1, total=4))

    peer.on[messages.Acquire] = never

    def acquire_within(timeout_s: float) -> DeadlineExceeded:
        session = hurried(timeout_s)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            session.acquire(1)
        assert time.monotonic() - started < timeout_s + 20
        return caught.value

    error = patient_enough(acquire_within, is_early=lambda error: "it said nothing" in error.message)
    assert re.search(r"mem://s/1\.tar .*peer\.sock.*retrying after 503, 1 of 4", error.message)
    assert error.uri == URIS[1]


def test_shard_that_does_not_come_after_a_loss_tells_of_the_loss(peer, hurried):
    def lose_once(peer, sock, request):
        peer.on[messages.Acquire] = lambda peer, sock, request: None
        peer.drop()

    def acquire_within(timeout_s: float) -> str:
        session = hurried(timeout_s)
        peer.on[messages.Acquire] = lose_once
        with pytest.raises(DeadlineExceeded) as caught:
            session.acquire(1)
        return caught.value.message

    message = patient_enough(acquire_within, is_early=lambda message: "before that" not in message)
    assert re.search(r"mem://s/1\.tar did not come.*before that, the connection .* was lost", message)


def test_progress_does_not_extend_the_wait_for_a_shard(peer, hurried):
    def forever(peer, sock, request):
        for done in range(1000):
            peer.say(sock, messages.Progress(id=request.id, stage="fetching", done=done, total=0))
            time.sleep(0.01)

    session = hurried(0.3)
    peer.on[messages.Acquire] = forever
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        session.acquire(1)
    assert time.monotonic() - started < 20


def test_lease_that_comes_too_late_is_given_back(peer, hurried, monkeypatch):
    late = []
    session = hurried(0.2)
    peer.on[messages.Acquire] = lambda peer, sock, request: late.append((sock, request))
    with pytest.raises(DeadlineExceeded):
        session.acquire(1)
    wait_until(lambda: bool(late))
    peer.on.clear()
    monkeypatch.setattr(session, "_timeout_s", 60.0)
    peer.lease(*late[0])
    lease = session.acquire(0)
    assert lease.read(0, 1) == SHARDS[URIS[0]][:1]
    session.advance(1)
    peer.wait_for(messages.Release)
    assert peer.requests(messages.Release) == [messages.Release(shard=1)]


@pytest.fixture
def interrupts():
    """Ctrl-C is heard, also by a process that was started in the background, where shells turn it off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_interrupted_wait_leaves_the_session_usable(peer, session):
    late = []

    def interrupt(peer, sock, request):
        late.append((sock, request))
        os.kill(os.getpid(), signal.SIGINT)

    session.open_dataset(SPEC)
    peer.on[messages.Acquire] = interrupt
    with pytest.raises(KeyboardInterrupt):
        session.acquire(1)
    peer.on.clear()
    peer.lease(*late[0])
    assert session.acquire(3).read(0, 2) == SHARDS[URIS[3]][:2]
    session.advance(1)
    peer.wait_for(messages.Release)
    assert messages.Release(shard=1) in peer.requests(messages.Release)


def test_error_of_the_origin_reaches_the_caller_and_the_session_goes_on(peer, session):
    session.open_dataset(SPEC)
    peer.on[messages.Acquire] = lambda peer, sock, request: peer.say(
        sock, messages.Failed(id=request.id, kind="OriginNotFound", message="gone", uri=URIS[0])
    )
    with pytest.raises(OriginNotFound, match="gone"):
        session.acquire(0)
    peer.on.clear()
    assert session.acquire(0).read(0, 1) == b"A"
    assert peer.num_connections == 1


def test_index_that_is_cut_is_an_error_and_no_descriptor_stays_open(peer, options):
    def cut(peer, sock, request):
        peer.say(sock, messages.Leased(id=request.id, size_bytes=4, source="nvme"), b"data")
        peer.say(sock, messages.LeasedIndex(id=request.id, size_bytes=100), b"short")

    peer.on[messages.Acquire] = cut
    session = DaemonTransport(
        lambda: Route(home=SharedDaemon(peer.path, patience_s=60), substitute=None, options=options()), timeout_s=60
    )
    session.open_dataset(SPEC)
    with pytest.raises(DaemonUnavailable, match=r"6 times in a row.*ends at byte 5 of 100"):
        session.acquire(0)
    session.close()
    wait_until(lambda: not any("memfd:scripted-Leased" in target for target in links_of(os.getpid())))


def test_closing_ends_every_lease_and_is_final(peer, session):
    session.open_dataset(SPEC)
    lease = session.acquire(0)
    session.close()
    session.close()
    with pytest.raises(OSError, match="released"):
        lease.read(0, 1)
    with pytest.raises(ConfigError, match="closed"):
        session.acquire(0)


def test_acquire_before_opening_says_what_is_missing(session):
    with pytest.raises(ConfigError, match="open_dataset"):
        session.acquire(0)


def test_forked_child_has_a_session_of_its_own(peer, session):
    session.open_dataset(SPEC)
    session.follow(plan(0, 1))
    lease = session.acquire(0)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            other = session.acquire(1)
            assert other.read(0, other.size_bytes) == SHARDS[URIS[1]]
            assert session.statistics().acquires == 1
            lease.release()
            session.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lease.read(0, 2) == b"AA"
    assert session.acquire(3).read(0, 1) == b"D"
    assert peer.num_connections == 2
    assert peer.requests(messages.OpenDataset)[1] == messages.OpenDataset(id=1, digest=peer.manifest.digest)
    assert len(peer.requests(messages.FollowPlan)) == 2
    assert session.statistics().route.reconnects == 0


def test_fork_and_close_in_the_child_without_use_is_silent(peer, session):
    session.open_dataset(SPEC)
    pid = os.fork()
    if pid == 0:
        session.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert session.acquire(3).read(0, 1) == b"D"
    assert peer.num_connections == 1


def test_socket_path_longer_than_the_kernel_takes_still_connects(tmp_path, options):
    folder = tmp_path / ("long" * 30) / ("er" * 20)
    folder.mkdir(parents=True)
    assert len(str(folder)) > 107
    here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    bound = ScriptedPeer(type(tmp_path)(f"/proc/self/fd/{here}/d.sock"))
    with bound:
        session = open_transport(options(daemon=f"unix://{folder}/d.sock"))
        assert session.open_dataset(SPEC).digest == bound.manifest.digest
        session.close()
    os.close(here)
