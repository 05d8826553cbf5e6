"""One connection to a peer that speaks the protocol: a blocking socket, one request at a time, every wait bounded.

The peer may be the node daemon or the helper process that reads without one. No thread and no event loop: the socket
lives in a training process, which may fork at any time.
"""

from __future__ import annotations

import os
import platform
import select
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cacheloader
from cacheloader import fdpass
from cacheloader.errors import DaemonUnavailable, ProtocolError, from_wire
from cacheloader.protocol import frames, messages
from cacheloader.transport.inheritance import close_after_fork

if TYPE_CHECKING:
    import socket

_OVERSLEPT_S = 0.5
"""A wait that ends so much too late tells that this process stood still, and perhaps its peer with it: a job that was
suspended, or a node without a free processor. Then the peer's time begins anew."""


class PeerGone(DaemonUnavailable):
    """Nobody answers at the other end, any more or just now; a new connection may find it again."""


class PeerSilent(PeerGone):
    """Somebody is at the other end and says nothing: it hangs, or was stopped. To ask again at once does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One reply that belongs to the request under way.

    Attributes:
        reply: The message.
        fd: The descriptor that came with it, owned by the receiver; ``None`` if there was none.
    """

    reply: messages.Reply
    fd: int | None

    def take_fd(self) -> int:
        """The descriptor.

        Raises:
            ProtocolError: The peer sent none.
        """
        if self.fd is None:
            raise ProtocolError(f"a {type(self.reply).__name__} came without the descriptor that belongs to it")
        return self.fd

    def close(self) -> None:
        """Close the descriptor, if there is one."""
        if self.fd is not None:
            os.close(self.fd)


class Link:
    """A connection.

    Args:
        sock: A connected SEQPACKET socket; the link owns it from here on.
        peer: Who is at the other end, for errors.
        silence_s: How long a peer that promises signs of life may say nothing while a request waits; ``None`` to wait
            until the request's own deadline.
    """

    def __init__(self, sock: socket.socket, *, peer: str, silence_s: float | None = None) -> None:
        # The socket itself never waits, ``_wait`` does: a timeout set on it would be shared with the release of a lease
        # that the garbage collector runs between two lines of ``receive``.
        sock.settimeout(0.0)
        self.peer = peer
        self.end = ""
        """Why the connection was lost, "" as long as it is not known to be."""
        self.version = 0
        """What was agreed on with the peer, 0 before."""
        self._silence_s = silence_s
        self._sock: socket.socket | None = sock
        self._last_id = 0
        self._released: deque[int] = deque()
        self._clock: int | None = None
        self._abandoned: dict[int, int] = {}
        self._sending = threading.Lock()
        # Not in ``__del__``: where a link dies as part of a cycle, the socket may be finalised first and warn.
        weakref.finalize(self, sock.close)
        close_after_fork(self)

    @property
    def is_open(self) -> bool:
        """Whether the connection has not been closed or lost, as far as this side knows."""
        return self._sock is not None

    def fileno(self) -> int:
        """The socket's descriptor, for a poll.

        Raises:
            PeerGone: The connection is closed.
        """
        return self._socket().fileno()

    def next_id(self) -> int:
        """An id for a request, unique on this connection."""
        self._last_id += 1
        return self._last_id

    def hello(self, *, deadline: float) -> messages.Welcome:
        """Agree on a protocol version.

        Args:
            deadline: On the clock of ``time.monotonic``.

        Raises:
            ProtocolError: The peer speaks no common version, or another protocol.
            PeerGone: It went away.
            PeerSilent: It did not answer in time.
        """
        self.say_hello()
        patience_s = deadline - time.monotonic()
        while True:
            try:
                return self.hear_welcome(deadline=deadline)
            except TimeoutError:
                now_s = time.monotonic()
                if now_s - deadline < _OVERSLEPT_S or patience_s <= 0:
                    raise self._silent("it accepted the connection and has not answered it") from None
                deadline = now_s + patience_s

    def say_hello(self) -> None:
        """The first half of ``hello``; never waits.

        Raises:
            PeerGone: The peer is gone.
        """
        client = f"cacheloader {cacheloader.__version__} python {platform.python_version()} pid {os.getpid()}"
        hello = messages.Hello(oldest=messages.OLDEST_VERSION, newest=messages.VERSION, client=client)
        self.send(hello, deadline=0.0)  # the first message always fits

    def hear_welcome(self, *, deadline: float) -> messages.Welcome:
        """The second half of ``hello``.

        Raises:
            TimeoutError: The answer is not there yet; this may be called again.
            ProtocolError, PeerGone: As in ``hello``.
        """
        answer = self._receive(deadline)
        if isinstance(answer.reply, messages.Failed):
            raise from_wire(answer.reply.kind, answer.reply.message, answer.reply.uri)
        if not isinstance(answer.reply, messages.Welcome) or answer.fd is not None:
            answer.close()
            raise ProtocolError(f"{self.peer} answered Hello with {type(answer.reply).__name__}")
        self.version = answer.reply.version
        return answer.reply

    def send(self, request: messages.Request, fd: int | None = None, *, deadline: float) -> None:
        """Send a request, after everything that was put off.

        Raises:
            PeerGone: The peer is gone.
            PeerSilent: It does not read, and should.
            TimeoutError: It does not read until the deadline.
        """
        until = self._patience(deadline)
        try:
            self._send_all(request, fd, until)
        except TimeoutError:
            if until >= deadline:
                raise
            raise self._silent("it does not read its messages") from None

    def _send_all(self, request: messages.Request, fd: int | None, deadline: float) -> None:
        with self._sending:
            for waiting in self._put_off():
                self._send(waiting, None, deadline)
            self._send(request, fd, deadline)

    def advance(self, clock: int) -> None:
        """Say where the session stands; never waits and never fails: what cannot be sent now goes with a later call."""
        self._clock = clock
        self._flush()

    def release(self, shard: int) -> None:
        """Give back one lease; never waits and never fails. Safe inside the garbage collector and in any thread."""
        self._released.append(shard)
        self._flush()

    def abandon(self, request_id: int, shard: int) -> None:
        """Give up waiting for a lease: when it comes it is given back."""
        self._abandoned[request_id] = shard

    def receive(self, request_id: int, *, deadline: float) -> Answer:
        """The next reply to ``request_id``; replies to requests that were given up are dropped.

        Raises:
            CacheloaderError: The peer reported that the request failed, as the class that it named.
            PeerGone: The peer is gone, or said that it is leaving.
            PeerSilent: It should have given a sign of life long ago.
            TimeoutError: Nothing came until the deadline.
        """
        while True:
            until = self._patience(deadline)
            try:
                answer = self._receive(until)
            except TimeoutError:
                if until >= deadline:
                    raise
                if time.monotonic() - until >= _OVERSLEPT_S:
                    continue
                raise self._silent("it says nothing while a request waits") from None
            reply = answer.reply
            if isinstance(reply, messages.Failed) and reply.id in (0, request_id):
                answer.close()
                error = from_wire(reply.kind, reply.message, reply.uri)
                if reply.id == 0 or isinstance(error, DaemonUnavailable):
                    raise self._lost(reply.message)
                raise error
            if isinstance(reply, messages.Welcome) or reply.id != request_id:
                self._drop(answer)
            else:
                return answer

    def close(self) -> None:
        """Close the connection; the peer takes back all that it lent. Calling it again does nothing."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def close_in_child(self) -> None:
        """Close this process's copy; the connection itself belongs to the parent."""
        self._sending = threading.Lock()  # another thread of the parent may have held it
        self.close()

    def _put_off(self) -> list[messages.Request]:
        """Releases and the clock that wait to be sent, oldest first; the caller sends them or puts them back."""
        waiting: list[messages.Request] = []
        while self._released:
            waiting.append(messages.Release(shard=self._released.popleft()))
        if self._clock is not None:
            waiting.append(messages.Advance(clock=self._clock))
            self._clock = None
        return waiting

    def _flush(self) -> None:
        # The lock is held where this thread was interrupted in the middle of ``send`` (by the garbage collector), or
        # where another thread sends: the note that was just taken goes with the next message.
        if self._sock is None or not self._sending.acquire(blocking=False):
            return
        waiting: list[messages.Request] = []
        try:
            waiting = self._put_off()
            while waiting:
                self._send(waiting[0], None, 0.0)
                del waiting[0]
        except (PeerGone, TimeoutError):
            for request in reversed(waiting):
                if isinstance(request, messages.Release):
                    self._released.appendleft(request.shard)
                elif isinstance(request, messages.Advance) and self._clock is None:
                    self._clock = request.clock
        finally:
            self._sending.release()

    def _send(self, request: messages.Request, fd: int | None, deadline: float) -> None:
        data = frames.encode(request)
        while True:
            sock = self._socket()
            try:
                fdpass.send(sock, data, fd)
            except BlockingIOError:
                if not _wait(sock, select.POLLOUT, deadline):
                    raise TimeoutError(f"{self.peer} does not read its messages") from None
            except OSError as error:
                raise self._lost(str(error)) from error
            else:
                return

    def _receive(self, deadline: float) -> Answer:
        while True:
            sock = self._socket()
            try:
                received = fdpass.receive(sock)
            except BlockingIOError:
                if not _wait(sock, select.POLLIN, deadline):
                    raise TimeoutError(f"{self.peer} did not answer in time") from None
                continue
            except ProtocolError as error:
                # The kernel cuts a message whose descriptor finds no place in this process.
                raise self._lost(f"{error.message}; is the limit of open files (ulimit -n) reached?") from error
            except OSError as error:
                raise self._lost(str(error)) from error
            if not received.data:
                raise self._lost("it closed the connection")
            try:
                return Answer(reply=frames.decode_reply(received.data), fd=received.fd)
            except ProtocolError as error:
                if received.fd is not None:
                    os.close(received.fd)
                raise self._lost(error.message) from error

    def _drop(self, answer: Answer) -> None:
        answer.close()
        reply = answer.reply
        if isinstance(reply, messages.Leased):
            shard = self._abandoned.pop(reply.id, None)
            if shard is not None:
                self.release(shard)
        elif isinstance(reply, messages.Failed):
            self._abandoned.pop(reply.id, None)

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise PeerGone(f"the connection to {self.peer} is closed")
        return self._sock

    def _patience(self, deadline: float) -> float:
        """The end of the next wait for the peer."""
        if self._silence_s is None or self.version < messages.SIGNS_OF_LIFE:
            return deadline
        return min(deadline, time.monotonic() + self._silence_s)

    def _silent(self, what: str) -> PeerSilent:
        pid = 0 if self._sock is None else fdpass.peer_credentials(self._sock).pid
        self.close()
        # The other end of a socket pair is this process's own, and that of an activated socket is the supervisor.
        known = pid > 1 and pid not in (os.getpid(), os.getppid())
        who = f" (pid {pid}): wake it with kill -CONT {pid}, or end it with kill -9 {pid}" if known else ""
        self.end = f"{self.peer} hangs or was stopped, since {what}{who}"
        return PeerSilent(self.end)

    def _lost(self, why: str) -> PeerGone:
        self.close()
        self.end = f"the connection to {self.peer} was lost: {why}"
        return PeerGone(self.end)


def _wait(sock: socket.socket, event: int, deadline: float) -> bool:
    """Whether ``event``, or an error, came before the deadline."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
