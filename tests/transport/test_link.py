from __future__ import annotations

import gc
import os
import socket
import time
import weakref
from typing import TYPE_CHECKING

import pytest

from cacheloader import fdpass
from cacheloader.errors import DaemonError, OriginNotFound, ProtocolError
from cacheloader.protocol import frames, messages
from cacheloader.transport import link as link_module
from cacheloader.transport.link import Link, PeerGone, PeerSilent
from tests.support.descriptors import links_of
from tests.transport.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pair:
    """A link and the bare socket at its other end."""

    def __init__(self, silence_s: float | None = None) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs.settimeout(60)
        self.link = Link(ours, peer="the test", silence_s=silence_s)

    def say(self, reply: messages.Reply, fd: int | None = None) -> None:
        fdpass.send(self.theirs, frames.encode(reply), fd)

    def hear(self) -> messages.Request:
        return frames.decode_request(fdpass.receive(self.theirs).data)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.link.close()
    pair.theirs.close()


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def test_hello_agrees_on_a_version(pair):
    pair.say(messages.Welcome(version=1, daemon="d", pid=7, quota_bytes=9))
    welcome = pair.link.hello(deadline=soon())
    assert (welcome.pid, welcome.quota_bytes) == (7, 9)
    hello = pair.hear()
    assert isinstance(hello, messages.Hello)
    assert (hello.oldest, hello.newest) == (messages.OLDEST_VERSION, messages.VERSION)


def test_refused_hello_is_the_error_that_the_peer_named(pair):
    pair.say(messages.Failed(id=0, kind="ProtocolError", message="too old"))
    with pytest.raises(ProtocolError, match="too old"):
        pair.link.hello(deadline=soon())


def test_peer_that_does_not_answer_hello_is_gone(pair):
    with pytest.raises(PeerGone, match="the test"):
        pair.link.hello(deadline=soon(0.05))


def test_peer_that_is_silent_while_a_request_waits_hangs_and_one_that_gives_signs_of_life_does_not():
    pair = Pair(silence_s=0.5)
    pair.say(messages.Welcome(version=messages.SIGNS_OF_LIFE, daemon="d", pid=7, quota_bytes=9))
    pair.link.hello(deadline=soon())
    for _ in range(3):
        time.sleep(0.3)  # the pace of the signs of life, not a wait for something
        pair.say(messages.Progress(id=1, stage="fetching", done=0, total=0))
        assert isinstance(pair.link.receive(1, deadline=soon(60)).reply, messages.Progress)
    with pytest.raises(PeerSilent, match="the test hangs or was stopped"):
        pair.link.receive(1, deadline=soon(60))
    assert not pair.link.is_open
    pair.theirs.close()


def test_a_process_that_stood_still_itself_gives_its_peer_the_time_anew(monkeypatch):
    """As a job that was suspended with its daemon, or a node without a free processor."""
    pair = Pair(silence_s=30.0)
    clock, wait = Clock(), link_module._wait
    answers = [
        messages.Welcome(version=messages.SIGNS_OF_LIFE, daemon="d", pid=7, quota_bytes=9),
        messages.Progress(id=1, stage="fetching", done=0, total=0),
    ]

    def stand_still_once(sock, event, deadline):
        monkeypatch.setattr(link_module, "_wait", wait)
        clock.ahead_s += 40.0
        pair.say(answers.pop(0))
        return False

    monkeypatch.setattr(link_module, "time", clock)
    monkeypatch.setattr(link_module, "_wait", stand_still_once)
    assert pair.link.hello(deadline=clock.monotonic() + 30).pid == 7
    monkeypatch.setattr(link_module, "_wait", stand_still_once)
    assert isinstance(pair.link.receive(1, deadline=clock.monotonic() + 600).reply, messages.Progress)
    pair.link.close()
    pair.theirs.close()


def test_peer_of_an_older_version_promised_no_signs_of_life():
    pair = Pair(silence_s=0.1)
    pair.say(messages.Welcome(version=messages.SIGNS_OF_LIFE - 1, daemon="d", pid=7, quota_bytes=9))
    pair.link.hello(deadline=soon())
    with pytest.raises(TimeoutError):
        pair.link.receive(1, deadline=soon(0.4))
    assert pair.link.is_open
    pair.link.close()
    pair.theirs.close()


def test_hang_names_no_process_that_should_not_be_killed(pair):
    """The other end of a socket pair belongs to this very process."""
    with pytest.raises(PeerSilent) as caught:
        pair.link.hello(deadline=soon(0.05))
    assert "kill" not in caught.value.message


def test_receive_gives_up_at_its_deadline_and_not_much_later(pair):
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        pair.link.receive(1, deadline=started + 0.1)
    assert 0.1 <= time.monotonic() - started < 20


def test_failure_becomes_the_error_that_the_peer_named(pair):
    pair.say(messages.Failed(id=4, kind="OriginNotFound", message="no such object", uri="s3://b/k"))
    with pytest.raises(OriginNotFound, match="no such object") as caught:
        pair.link.receive(4, deadline=soon())
    assert caught.value.uri == "s3://b/k"
    assert pair.link.is_open


@pytest.mark.parametrize(
    "end", ["closed", "garbage", "leaving", "connection at fault", "two descriptors"], ids=lambda end: end
)
def test_peer_that_cannot_go_on_is_gone_and_the_link_is_closed(pair, end):
    match end:
        case "closed":
            pair.theirs.close()
        case "garbage":
            pair.theirs.send(b"\xff\xfe")
        case "leaving":
            pair.say(messages.Failed(id=1, kind="DaemonUnavailable", message="leaving"))
        case "connection at fault":
            pair.say(messages.Failed(id=0, kind="ProtocolError", message="what was that"))
        case "two descriptors":
            socket.send_fds(pair.theirs, [b"x"], [0, 0])
    with pytest.raises(PeerGone):
        pair.link.receive(1, deadline=soon())
    assert not pair.link.is_open
    with pytest.raises(PeerGone):
        pair.link.send(messages.Acquire(id=2, shard=0), deadline=soon())


def test_replies_to_requests_that_were_given_up_are_dropped_and_their_leases_given_back(pair):
    pair.link.abandon(1, 33)
    fd = fdpass.sealed_memory_file("late", b"late")
    pair.say(messages.Leased(id=1, size_bytes=4, source="nvme"), fd)
    pair.say(messages.LeasedIndex(id=1, size_bytes=4), fd)
    pair.say(messages.Accepted(id=2))
    answer = pair.link.receive(2, deadline=soon())
    assert isinstance(answer.reply, messages.Accepted)
    assert [link for link in links_of(os.getpid()) if "memfd:late" in link] == [os.readlink(f"/proc/self/fd/{fd}")]
    assert pair.hear() == messages.Release(shard=33)
    os.close(fd)


def test_what_cannot_be_sent_now_goes_with_a_later_request_and_only_the_last_clock_counts(pair):
    sent = 0
    while not pair.link._released:  # until the socket's buffer is full
        pair.link.release(sent)
        sent += 1
    for clock in range(5):
        pair.link.advance(clock)  # neither waits nor fails
    pair.link.release(10**6)
    heard = [pair.hear() for _ in range(sent - 1)]
    pair.link.send(messages.Acquire(id=1, shard=3), deadline=soon())
    heard += [pair.hear() for _ in range(4)]
    assert heard == [
        *(messages.Release(shard=shard) for shard in range(sent)),
        messages.Release(shard=10**6),
        messages.Advance(clock=4),
        messages.Acquire(id=1, shard=3),
    ]


def send_without_end(link: Link, *, deadline: float) -> None:
    while True:
        link.send(messages.Acquire(id=link.next_id(), shard=0), deadline=deadline)


def test_peer_that_reads_nothing_runs_into_the_deadline(pair):
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="does not read"):
        send_without_end(pair.link, deadline=started + 0.1)
    assert time.monotonic() - started < 20


def test_advance_and_release_on_a_dead_peer_say_nothing(pair):
    pair.theirs.close()
    pair.link.advance(1)
    pair.link.release(2)
    pair.link.advance(3)
    assert not pair.link.is_open


def test_release_from_the_garbage_collector_in_the_middle_of_a_send_waits_for_the_next(pair, monkeypatch):
    real = fdpass.send

    def send_with_collection(sock, data, fd=None):
        monkeypatch.setattr(fdpass, "send", real)
        pair.link.release(8)  # as a finalizer would, between two lines
        real(sock, data, fd)

    monkeypatch.setattr(fdpass, "send", send_with_collection)
    pair.link.send(messages.Acquire(id=1, shard=0), deadline=soon())
    pair.link.send(messages.Acquire(id=2, shard=0), deadline=soon())
    assert [pair.hear() for _ in range(3)] == [
        messages.Acquire(id=1, shard=0),
        messages.Release(shard=8),
        messages.Acquire(id=2, shard=0),
    ]


def test_forked_child_closes_its_copy_and_the_parents_connection_goes_on(pair):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert not pair.link.is_open
            pair.link.release(1)
            pair.link.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pair.say(messages.Accepted(id=1))
    assert isinstance(pair.link.receive(1, deadline=soon()).reply, messages.Accepted)


def test_link_that_nobody_holds_closes_without_a_warning():
    pair = Pair()
    gone = weakref.ref(pair.link)
    del pair.link
    gc.collect()
    assert gone() is None
    assert pair.theirs.recv(10) == b""
    pair.theirs.close()


def test_descriptor_that_should_have_come_and_did_not_is_a_protocol_error(pair):
    pair.say(messages.Leased(id=1, size_bytes=4, source="nvme"))
    answer = pair.link.receive(1, deadline=soon())
    with pytest.raises(ProtocolError, match="without the descriptor"):
        answer.take_fd()


def test_failure_of_a_class_that_only_a_newer_peer_knows_is_a_daemon_error(pair):
    pair.say(messages.Failed(id=1, kind="FluxCapacitorEmpty", message="no"))
    with pytest.raises(DaemonError, match="no"):
        pair.link.receive(1, deadline=soon())
