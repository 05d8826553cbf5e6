"""An HTTP proxy between a client and one server that counts, delays and breaks responses on demand.

The client addresses (and signs for) the proxy; the server sees the same Host header, so that S3 signatures hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from tests.support.http_relay import Head, read_body, read_head


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What shall happen to matching requests.

    Attributes:
        action: ``status``: answer so at once. ``reset``, ``close``, ``stall``, ``drip``: pass ``after_bytes`` of the
            body, then break the connection with RST, end it with FIN, send nothing more, or a byte now and then.
            ``shorten``: a well-formed response whose body has only ``after_bytes``. ``lengthen``: more bytes than
            announced. ``flip``: one bit of the byte at ``after_bytes`` is wrong. ``ignore_range``: the whole object, as
            by a server without ranges.
        times: How many requests, 0 for all.
        method: Only these.
        path: Only paths that contain this text.
    """

    action: Literal["status", "reset", "close", "stall", "drip", "shorten", "lengthen", "flip", "ignore_range"]
    times: int = 0
    method: str = "GET"
    path: str = ""
    status: int = 503
    code: str = "SlowDown"
    after_bytes: int = 0
    retry_after_s: float | None = None


_CUTTING = {"reset", "close", "stall", "drip", "shorten"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request that was answered, wholly or in part."""

    method: str
    path: str
    byte_range: str
    status: int
    body_bytes: int
    started_s: float


class CountingProxy:
    """Runs in a thread of its own until ``stop``; every attribute may be changed while it runs.

    Attributes:
        latency_s: Wait before each response.
        is_held: No response begins as long as this is set.
        bandwidth_bytes_per_s: Cap on all bodies together, 0 for none.
        exchanges: What was answered so far.
        peak_in_flight: Most requests that were open at one moment.
    """

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.latency_s = 0.0
        self.is_held = False
        self.bandwidth_bytes_per_s = 0.0
        self.exchanges: list[Exchange] = []
        self.peak_in_flight = 0
        self._in_flight = 0
        self._handlers: set[asyncio.Task[None]] = set()
        self._faults: list[list[object]] = []
        self._paced_until_s = 0.0
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="counting-proxy", daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def in_flight(self) -> int:
        """Requests open right now."""
        return self._in_flight

    @property
    def num_connections(self) -> int:
        """Connections whose client has not left, or whose last request is not dealt with yet."""
        return len(self._handlers)

    def start(self) -> CountingProxy:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def inject(self, *faults: Fault) -> None:
        """Let ``faults`` happen, after those that were injected before."""
        with self._lock:
            self._faults += [[fault, fault.times] for fault in faults]

    def reset(self) -> None:
        """Behave again, and forget what was counted. Stalled responses stay stalled."""
        with self._lock:
            self._faults.clear()
            self.exchanges.clear()
        self.latency_s = self.bandwidth_bytes_per_s = 0.0
        self.is_held = False
        self.peak_in_flight = self._in_flight

    def body_bytes(self) -> Counter[str]:
        """Bytes of GET bodies by decoded path, listings excluded."""
        counter: Counter[str] = Counter()
        for exchange in self.reads():
            counter[unquote(exchange.path)] += exchange.body_bytes
        return counter

    def reads(self) -> list[Exchange]:
        """The GETs that were no listings. One without a length is noted behind its last byte."""
        return [
            exchange
            for exchange in list(self.exchanges)
            if exchange.method == "GET" and "list-type=" not in exchange.path
        ]

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        await self._listen()
        self._ready.set()
        await self._stopped.wait()
        await self._hang_up()

    async def _listen(self) -> None:
        # No asyncio server: it would leave connections that it has taken and not handed over yet to the collector, and
        # so to a warning in a later test.
        self._listener = listener = socket.create_server(("127.0.0.1", self.port), backlog=100)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it is gone again
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._handle(connection))
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        # One that is cancelled before it begins closes nothing itself.
        task.add_done_callback(lambda _: connection.close())

    async def _hang_up(self) -> None:
        """Take no more connections and break those that are open."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener)
            listener.close()
        for task in list(self._handlers):
            task.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    async def _handle(self, connection: socket.socket) -> None:
        ends: list[asyncio.StreamWriter] = []
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
            ends.append(writer)
            upstream, upstream_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
            ends.append(upstream_writer)
            while await self._relay(reader, writer, upstream, upstream_writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            for end in ends[:1]:
                end.transport.abort()
        except asyncio.CancelledError:
            for end in ends:  # nobody may be reading what is still to be sent
                end.transport.abort()
            raise
        finally:
            for end in ends:
                end.close()
            for end in ends:
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream: asyncio.StreamReader,
        upstream_writer: asyncio.StreamWriter,
    ) -> bool:
        """Pass one request and its response; False when the connection shall not be used again."""
        request = await read_head(reader)
        if request is None:
            return False
        self._in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
        try:
            method, target, _ = request.first_line.split(" ", 2)
            fault = self._refusal(request) or self._matching_fault(method, target)
            if request.get("expect"):
                request.drop("expect")
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            byte_range = request.get("range")
            if fault is not None and fault.action == "ignore_range":
                request.drop("range")
            body = read_body(reader, request, until_close=False)
            if fault is not None and fault.action == "status":
                async for _block in body:
                    pass
                await self._delay(method, target)
                self._record(method, target, byte_range, fault.status, 0)
                await self._answer(writer, fault, has_body=method != "HEAD")
                return True
            upstream_writer.write(request.encode())
            async for block in body:
                upstream_writer.write(block)
                await upstream_writer.drain()
            response = await read_head(upstream)
            if response is None:
                raise ConnectionError("the server closed the connection without an answer")
            await self._delay(method, target)
            return await self._pass_response(method, target, byte_range, response, upstream, reader, writer, fault)
        finally:
            self._in_flight -= 1

    async def _pass_response(
        self,
        method: str,
        target: str,
        byte_range: str,
        response: Head,
        upstream: asyncio.StreamReader,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        fault: Fault | None,
    ) -> bool:
        status = int(response.first_line.split(" ")[1])
        limit = fault.after_bytes if fault is not None and fault.action in _CUTTING else None
        shown = response
        if fault is not None and fault.action == "shorten":
            shown = Head(response.first_line, list(response.headers))
            shown.drop("content-length")
            shown.headers += [("Content-Length", str(fault.after_bytes)), ("Connection", "close")]
        has_body = method != "HEAD" and status not in {204, 304}
        passed = 0
        last = int(response.get("content-length") or -1) if limit is None else limit  # where the body ends, if known
        is_recorded = False

        def record_once() -> None:
            # Before the client can have the last byte, so that whoever saw a response end finds it counted.
            nonlocal is_recorded
            if not is_recorded:
                self._record(method, target, byte_range, status, passed)
                is_recorded = True

        if not has_body or last == 0:
            record_once()
        try:
            writer.write(shown.encode())
            if has_body:
                async for whole in read_body(upstream, response, until_close=True):
                    block = whole if limit is None else whole[: limit - passed]
                    if fault is not None and fault.action == "flip" and 0 <= fault.after_bytes - passed < len(block):
                        block = _flipped(block, fault.after_bytes - passed)
                    await self._pace(len(block))
                    passed += len(block)
                    if passed == last:
                        record_once()
                    writer.write(block)
                    await writer.drain()
                    if passed == limit:
                        break
        finally:
            record_once()
        if fault is not None and limit is not None:
            await self._break(reader, writer, fault)
            return False
        if fault is not None and fault.action == "lengthen":
            writer.write(b"x" * 1000)
            await writer.drain()
            return False
        return response.get("connection").lower() != "close"

    async def _break(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault) -> None:
        if fault.action == "reset":
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif fault.action == "stall":
            await reader.read()  # until the client gives up
        elif fault.action == "drip":
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await reader.read(1)

    async def _answer(self, writer: asyncio.StreamWriter, fault: Fault, *, has_body: bool) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
        head = Head(f"HTTP/1.1 {fault.status} Injected")
        head.headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        if fault.retry_after_s is not None:
            head.headers.append(("Retry-After", f"{fault.retry_after_s:g}"))
        writer.write(head.encode() + (body if has_body else b""))
        await writer.drain()

    async def _delay(self, method: str, target: str) -> None:
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        while self.is_held:
            await asyncio.sleep(0.005)

    async def _pace(self, num_bytes: int) -> None:
        if not self.bandwidth_bytes_per_s:
            return
        now = time.monotonic()
        self._paced_until_s = max(now, self._paced_until_s) + num_bytes / self.bandwidth_bytes_per_s
        await asyncio.sleep(self._paced_until_s - now)

    def _refusal(self, request: Head) -> Fault | None:
        """Why this request is refused whatever it asks for; a subclass may look at who asks."""
        del request
        return None

    def _matching_fault(self, method: str, target: str) -> Fault | None:
        path = unquote(target)
        with self._lock:
            for entry in self._faults:
                fault, left = entry
                assert isinstance(fault, Fault)
                assert isinstance(left, int)
                if fault.method == method and fault.path in path:
                    if left == 1:
                        self._faults.remove(entry)
                    entry[1] = max(0, left - 1)
                    return fault
        return None

    def _record(self, method: str, target: str, byte_range: str, status: int, body_bytes: int) -> None:
        path = target if "list-type=" in target else urlsplit(target).path
        with self._lock:
            self.exchanges.append(
                Exchange(
                    method=method,
                    path=path,
                    byte_range=byte_range,
                    status=status,
                    body_bytes=body_bytes,
                    started_s=time.monotonic(),
                )
            )


def _flipped(block: bytes, at: int) -> bytes:
    return block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :]
