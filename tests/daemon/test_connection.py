"""One connection over a real socket pair, with a handler that notes what it is told."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import pytest
from cacheloader_daemon.server.connection import Connection, ConnectionLimits

from cacheloader import fdpass
from cacheloader.errors import OriginNotFound, ProtocolError
from cacheloader.protocol import frames, messages
from tests.support.descriptors import open_files, opened_since
from tests.support.hand_clock import HandClock
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO = frames.encode(messages.Hello(oldest=1, newest=1))


class Notes:
    """A handler, and what it was told."""

    def __init__(self) -> None:
        self.requests: list[messages.Request] = []
        self.fds: list[int] = []
        self.num_disconnected = 0
        self.num_closed = 0
        self.raises: Exception | None = None

    def requested(self, request: messages.Request, fd: int | None) -> None:
        if fd is not None:
            self.fds.append(fd)
        if self.raises is not None:
            raise self.raises
        self.requests.append(request)

    def disconnected(self) -> None:
        self.num_disconnected += 1

    def closed(self, _: Connection) -> None:
        self.num_closed += 1


@contextmanager
def connected(
    notes: Notes, *, clock: HandClock | None = None, **limits: float
) -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(0.0)
    connection = Connection(
        ours,
        loop=cast("asyncio.AbstractEventLoop", clock) if clock is not None else asyncio.get_running_loop(),
        limits=ConnectionLimits(**limits),
        welcome=lambda version: messages.Welcome(version=version, daemon="test", pid=1, quota_bytes=2),
        open_handler=lambda _connection, _hello: notes,
        closed=notes.closed,
    )
    with theirs:
        yield connection, theirs
    connection.close()


async def heard(sock: socket.socket) -> messages.Reply | None:
    """The next reply, ``None`` at the end of the stream."""
    received: list[fdpass.Received] = []

    def poll() -> bool:
        try:
            received.append(fdpass.receive(sock))
        except BlockingIOError:
            return False
        return True

    await until(poll)
    return frames.decode_reply(received[0].data) if received[0].data else None


async def test_hello_is_answered_with_the_agreed_version() -> None:
    notes = Notes()
    with connected(notes) as (_, client):
        fdpass.send(client, HELLO)
        assert await heard(client) == messages.Welcome(version=1, daemon="test", pid=1, quota_bytes=2)
        fdpass.send(client, frames.encode(messages.Advance(clock=3)))
        await until(lambda: notes.requests == [messages.Advance(clock=3)])


@pytest.mark.parametrize(
    "first",
    [
        b"\xff" * 40,
        b"\x00",
        frames.encode(messages.Advance(clock=1)),
        frames.encode(messages.Hello(oldest=messages.VERSION + 1, newest=messages.VERSION + 9)),
    ],
    ids=["noise", "zero", "not Hello", "newer only"],
)
async def test_a_first_message_that_is_no_valid_hello_is_told_why_and_closed(first: bytes) -> None:
    notes = Notes()
    with connected(notes) as (connection, client):
        fdpass.send(client, first)
        fdpass.send(client, HELLO)  # already on its way when the daemon refuses
        reply = await heard(client)
        assert isinstance(reply, messages.Failed)
        assert (reply.id, reply.kind) == (0, "ProtocolError")
        assert await heard(client) is None
        client.close()
        await until(lambda: connection.is_closed)
    assert notes.num_closed == 1
    assert notes.num_disconnected == 0


async def test_a_client_that_never_says_hello_is_closed() -> None:
    notes = Notes()
    with connected(notes, hello_timeout_s=0.05, linger_s=0.05) as (connection, client):
        reply = await heard(client)
        assert isinstance(reply, messages.Failed)
        assert "no Hello" in reply.message
        await until(lambda: connection.is_closed)


async def test_a_broken_rule_closes_the_connection_once_the_client_was_told() -> None:
    notes = Notes()
    notes.raises = ProtocolError("id 3 is in use")
    with connected(notes, linger_s=0.05) as (connection, client):
        fdpass.send(client, HELLO)
        await heard(client)
        fdpass.send(client, frames.encode(messages.GetStatus(id=3)))
        assert await heard(client) == messages.Failed(id=0, kind="ProtocolError", message="id 3 is in use")
        await until(lambda: connection.is_closed)
    assert notes.num_disconnected == 1


async def test_a_defect_in_a_handler_costs_its_own_client_only(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    notes.raises = KeyError("a defect")
    with connected(notes, linger_s=0.05) as (connection, client):
        fdpass.send(client, HELLO)
        await heard(client)
        fdpass.send(client, frames.encode(messages.GetStatus(id=3)))
        reply = await heard(client)
        assert isinstance(reply, messages.Failed)
        assert reply.kind == "DaemonError"
        await until(lambda: connection.is_closed)
    assert "met a defect" in caplog.text


async def test_answers_and_their_descriptors_wait_for_a_slow_reader_in_order() -> None:
    notes = Notes()
    before = open_files()
    with connected(notes) as (connection, client):
        fdpass.send(client, HELLO)
        await heard(client)
        for number in range(600):
            fd = fdpass.sealed_memory_file("answer", str(number).encode())
            connection.send(messages.Status(id=number), fd)
        assert connection.num_outgoing > 0
        for number in range(600):
            await until(lambda: _readable(client))
            received = fdpass.receive(client)
            assert frames.decode_reply(received.data) == messages.Status(id=number)
            assert received.fd is not None
            assert os.pread(received.fd, 10, 0) == str(number).encode()
            os.close(received.fd)
        assert connection.num_outgoing == 0
    await until(lambda: not opened_since(before))


async def test_nothing_is_read_from_a_client_that_reads_nothing() -> None:
    """A flood of requests whose answers are left unread stops at the sockets' own buffers."""
    notes = Notes()
    with connected(notes, max_outgoing=8) as (connection, client):
        fdpass.send(client, HELLO)
        await heard(client)

        def answer_each(request: messages.Request, fd: int | None) -> None:
            notes.requests.append(request)
            connection.send(messages.Failed(id=1, kind="X", message="x" * 4000))

        notes.requested = answer_each  # type: ignore[method-assign]
        sent = 0
        while sent < 10_000 and _send(client, frames.encode(messages.GetStatus(id=1))):
            sent += 1
            if sent % 50 == 0:
                await asyncio.sleep(0)
        await until(lambda: connection.num_outgoing >= 8)
        assert connection.num_outgoing <= 8
        taken = len(notes.requests)
        assert taken < 300
        # It reads at last: everything moves again.
        for _ in range(taken):
            assert await heard(client) is not None
        await until(lambda: len(notes.requests) > taken)


async def test_a_client_that_leaves_answers_unread_for_too_long_is_closed() -> None:
    notes = Notes()
    before = open_files()
    with connected(notes, stall_timeout_s=0.05) as (connection, client):
        fdpass.send(client, HELLO)
        await heard(client)
        while connection.num_outgoing == 0:
            connection.send(messages.Status(id=1), fdpass.sealed_memory_file("answer", b"x"))
        await until(lambda: connection.is_closed)
    await until(lambda: not opened_since(before))


async def test_a_client_that_goes_away_frees_the_descriptors_meant_for_it() -> None:
    notes = Notes()
    before = open_files()
    with connected(notes) as (connection, client):
        fdpass.send(client, HELLO)
        await heard(client)
        while connection.num_outgoing < 5:
            connection.send(messages.Status(id=1), fdpass.sealed_memory_file("answer", b"x"))
        client.close()
        await until(lambda: connection.is_closed)
        connection.send(messages.Status(id=2), fdpass.sealed_memory_file("late", b"x"))
    await until(lambda: not opened_since(before))
    assert notes.num_disconnected == 1


async def test_two_descriptors_in_one_message_are_closed_and_refused() -> None:
    notes = Notes()
    before = open_files()
    with connected(notes, linger_s=0.05) as (connection, client):
        fdpass.send(client, HELLO)
        await heard(client)
        fd = fdpass.sealed_memory_file("spec", b"x")
        socket.send_fds(client, [frames.encode(messages.OpenDataset(id=1))], [fd, fd])
        os.close(fd)
        reply = await heard(client)
        assert isinstance(reply, messages.Failed)
        assert reply.kind == "ProtocolError"
        await until(lambda: connection.is_closed)
    await until(lambda: not opened_since(before))


def _readable(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def _send(sock: socket.socket, data: bytes) -> bool:
    try:
        fdpass.send(sock, data)
    except BlockingIOError:
        return False
    return True


async def test_a_client_that_reads_slowly_keeps_its_connection() -> None:
    notes, clock = Notes(), HandClock()
    with connected(notes, clock=clock, stall_timeout_s=3.0) as (connection, theirs):
        fdpass.send(theirs, HELLO)
        await heard(theirs)
        reply = messages.Failed(id=1, kind="DaemonError", message="x" * 20_000)
        while connection.num_outgoing < 40:
            connection.send(reply)
        for _ in range(3):  # longer than the timeout in all; the pace of the client is what is tested
            clock.let_pass(2.0)
            num_left = connection.num_outgoing
            while connection.num_outgoing == num_left:  # the kernel tells of room once much of its buffer is free
                await heard(theirs)
        assert connection.num_outgoing > 0
        assert not connection.is_closed
        clock.let_pass(3.1)  # and now it reads nothing
        assert connection.is_closed


async def test_an_error_that_names_a_file_whose_name_is_no_text_arrives() -> None:
    notes = Notes()
    with connected(notes) as (connection, theirs):
        fdpass.send(theirs, HELLO)
        await heard(theirs)
        connection.send(frames.failed(7, OriginNotFound("file:///bad\udcff.tar is gone", uri="file:///bad\udcff.tar")))
        reply = await heard(theirs)
        assert isinstance(reply, messages.Failed)
        assert reply.message == r"file:///bad\udcff.tar is gone"
        assert reply.uri == r"file:///bad\udcff.tar"
