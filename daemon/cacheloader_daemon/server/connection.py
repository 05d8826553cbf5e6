"""One client's connection: messages in, messages out, and nothing that one client does reaches another.

What comes in is bounded by reading a few messages per turn of the loop, and not at all while the client does not
read its answers. What goes out waits in a queue that owns its descriptors: they are closed when they are sent, and
when the client goes away.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from cacheloader import fdpass
from cacheloader.errors import CacheloaderError, DaemonError, ProtocolError
from cacheloader.protocol import frames
from cacheloader.protocol.messages import Hello, Welcome
from cacheloader_daemon.rates import Meter

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from cacheloader.protocol.messages import Reply, Request

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 32
"""Messages read before other connections get the loop; a flood then costs its neighbours one such burst."""


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one connection may cost.

    Attributes:
        hello_timeout_s: Time to say ``Hello``.
        stall_timeout_s: Time during which a client may leave its answers unread; it starts again with each that it
            reads.
        linger_s: Time that a client at fault has to read why its connection is closed.
        max_outgoing: Queued messages above which nothing more is read from the client.
        max_messages_per_s: Messages a second that are read from it; 0 for no limit. What comes faster waits unread.
    """

    hello_timeout_s: float = 10.0
    stall_timeout_s: float = 300.0
    linger_s: float = 1.0
    max_outgoing: int = 64
    max_messages_per_s: int = 0


class Handler(Protocol):
    """What happens to the messages of one connection."""

    def requested(self, request: Request, fd: int | None) -> None:
        """Take a request and the ownership of its descriptor.

        Raises:
            ProtocolError: The client broke the rules; its connection is closed.
        """
        ...

    def disconnected(self) -> None:
        """The connection is gone; called once."""
        ...


class _Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    data: bytes
    fd: int | None

    def discard(self) -> None:
        if self.fd is not None:
            os.close(self.fd)


class Connection:
    """Reads from and writes to one connected SEQPACKET socket, which it owns, on the loop's own thread."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        limits: ConnectionLimits,
        welcome: Callable[[int], Welcome],
        open_handler: Callable[[Connection, Hello], Handler],
        closed: Callable[[Connection], None],
    ) -> None:
        """Start reading.

        Args:
            sock: The connection.
            loop: The running loop.
            limits: What it may cost.
            welcome: Makes the answer to ``Hello`` for an agreed version.
            open_handler: Called once, after a valid ``Hello``.
            closed: Called once, when the socket is closed.
        """
        sock.settimeout(0.0)
        self._sock = sock
        self._loop = loop
        self._limits = limits
        self._welcome = welcome
        self._open_handler = open_handler
        self._closed = closed
        self._handler: Handler | None = None
        self._outgoing: deque[_Outgoing] = deque()
        self._reading = False
        self._writing = False
        self._ending = False
        self._is_closed = False
        self._meters: tuple[Meter, ...] = (Meter(limits.max_messages_per_s),)
        self._pause: asyncio.TimerHandle | None = None
        self.owner = ""
        """Name of the tenant whose it is."""
        self._deadline: asyncio.TimerHandle | None = loop.call_later(limits.hello_timeout_s, self._said_no_hello)
        self._set_reading()

    @property
    def peer(self) -> fdpass.PeerCredentials:
        """Who is at the other end."""
        return fdpass.peer_credentials(self._sock)

    @property
    def is_closed(self) -> bool:
        """Whether the socket is closed."""
        return self._is_closed

    @property
    def num_outgoing(self) -> int:
        """Messages that the client has not taken yet."""
        return len(self._outgoing)

    def share_pace(self, meter: Meter) -> None:
        """Messages of this connection count for ``meter`` too, which it has in common with others."""
        self._meters = (*self._meters, meter)

    def send(self, reply: Reply, fd: int | None = None) -> None:
        """Queue a reply, and with it ``fd``, whose ownership passes to the connection even if it is closed."""
        outgoing = _Outgoing(data=frames.encode(reply), fd=fd)
        if self._is_closed or self._ending:
            outgoing.discard()
            return
        self._outgoing.append(outgoing)
        if self._writing:
            self._set_reading()
        else:
            self._flush()

    def fail(self, error: CacheloaderError) -> None:
        """Tell the client that the connection is at fault, and close it once it was told or does not listen."""
        if self._is_closed or self._ending:
            return
        log.info("closing a connection: %s", error.message)
        self._ending = True
        self._arm(self._limits.linger_s, self.close)
        self._outgoing.append(_Outgoing(data=frames.encode(frames.failed(0, error)), fd=None))
        if not self._writing:
            self._flush()

    def close(self) -> None:
        """Close the socket and every descriptor that was not sent; calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._disarm()
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._set_reading()
        self._set_writing(wanted=False)
        while self._outgoing:
            self._outgoing.popleft().discard()
        self._sock.close()
        if self._handler is not None:
            self._handler.disconnected()
        self._closed(self)

    def _said_no_hello(self) -> None:
        self.fail(ProtocolError(f"no Hello came within {self._limits.hello_timeout_s:g} s of connecting"))

    def _stalled(self) -> None:
        log.warning("closing a connection that left %d answers unread", len(self._outgoing))
        self.close()

    def _arm(self, delay_s: float, then: Callable[[], None]) -> None:
        self._disarm()
        self._deadline = self._loop.call_later(delay_s, then)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _set_reading(self) -> None:
        wanted = not self._is_closed and (
            self._ending or (self._pause is None and len(self._outgoing) < self._limits.max_outgoing)
        )
        if wanted and not self._reading:
            self._loop.add_reader(self._sock.fileno(), self._readable)
        elif self._reading and not wanted:
            self._loop.remove_reader(self._sock.fileno())
        self._reading = wanted

    def _set_writing(self, *, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._sock.fileno(), self._flush)
            if not self._ending:
                self._arm(self._limits.stall_timeout_s, self._stalled)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._sock.fileno())
            if not (self._ending or self._is_closed):
                self._disarm()
        self._writing = wanted

    def _must_pause(self) -> bool:
        """Whether the next message has to wait; if so, reading goes on by itself once it need not."""
        now_s = self._loop.time()
        wait_s = max(meter.wait_s(now_s) for meter in self._meters)
        if wait_s <= 0 or self._ending:
            return False
        self._pause = self._loop.call_later(wait_s, self._end_pause)
        self._set_reading()
        return True

    def _end_pause(self) -> None:
        self._pause = None
        self._set_reading()

    def _readable(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if not self._reading or self._must_pause():
                return
            try:
                received = fdpass.receive(self._sock)
            except BlockingIOError:
                return
            except ProtocolError as error:
                self.fail(error)
                return
            except OSError:
                self.close()
                return
            if not received.data:
                if received.fd is not None:
                    os.close(received.fd)
                self.close()
                return
            for meter in self._meters:
                meter.spend(1, self._loop.time())
            if self._ending:
                # Read and dropped: closing with unread messages would reset the connection, and the reset would
                # reach the client ahead of the reason.
                if received.fd is not None:
                    os.close(received.fd)
            else:
                self._take(received)

    def _take(self, received: fdpass.Received) -> None:
        try:
            request = frames.decode_request(received.data)
        except ProtocolError as error:
            if received.fd is not None:
                os.close(received.fd)
            self.fail(error)
            return
        try:
            if self._handler is not None:
                self._handler.requested(request, received.fd)
            else:
                if received.fd is not None:
                    os.close(received.fd)
                self._greet(request)
        except CacheloaderError as error:
            self.fail(error)
        except Exception:
            # The outer edge of one client's work: a defect met here must cost this client and nobody else.
            log.exception("a request of type %s met a defect", type(request).__name__)
            self.fail(DaemonError("the daemon met a defect while it handled a request; its log has the traceback"))

    def _greet(self, request: Request) -> None:
        if not isinstance(request, Hello):
            raise ProtocolError(f"the first message was {type(request).__name__}; it has to be Hello")
        version = frames.agree(request)
        self._disarm()
        self._handler = self._open_handler(self, request)
        self.send(self._welcome(version))

    def _flush(self) -> None:
        num_before = len(self._outgoing)
        while self._outgoing:
            outgoing = self._outgoing[0]
            try:
                fdpass.send(self._sock, outgoing.data, outgoing.fd)
            except BlockingIOError:
                self._set_writing(wanted=True)
                if len(self._outgoing) < num_before and not self._ending:
                    # The client reads, if slowly.
                    self._arm(self._limits.stall_timeout_s, self._stalled)
                self._set_reading()
                return
            except OSError as error:
                log.info("a client went away with %d answers unsent: %s", len(self._outgoing), error)
                self.close()
                return
            self._outgoing.popleft().discard()
        self._set_writing(wanted=False)
        self._set_reading()
        if self._ending:
            self._finish()

    def _finish(self) -> None:
        """Everything was said: the client reads it, then the end of the stream, and closes or is closed in a moment."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
