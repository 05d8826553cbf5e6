"""A slow network between the demo's job and its object store: a relay that delays, throttles and counts."""

from __future__ import annotations

import asyncio
import threading
from typing import Self

_CHUNK_BYTES = 65536


class SlowLink:
    """Relays TCP connections to a local port, in a thread of its own, as a context manager.

    Args:
        port: The server's port on loopback.
        bytes_per_s: What all connections together get from the server.
        delay_s: What each request waits longer.
    """

    def __init__(self, *, port: int, bytes_per_s: float, delay_s: float) -> None:
        self._server_port = port
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._sent_bytes = 0
        self._free_at_s = 0.0
        self._port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="slow-link", daemon=True)

    @property
    def port(self) -> int:
        """The port that clients connect to, on loopback."""
        return self._port

    @property
    def bytes_per_s(self) -> float:
        """What all connections together get from the server; may be changed while the link is in use."""
        return self._bytes_per_s

    @bytes_per_s.setter
    def bytes_per_s(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    @property
    def sent_bytes(self) -> int:
        """Bytes that went from the server to clients so far, headers included."""
        return self._sent_bytes

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(10):
            raise TimeoutError("the demo's relay did not start within 10 s")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._closing.wait()
        server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, request = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.close()
            return
        pumps = [
            asyncio.ensure_future(self._pump(reader, request, delay_s=self._delay_s, paced=False)),
            asyncio.ensure_future(self._pump(upstream, writer, delay_s=0.0, paced=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass  # the link closes; asyncio's stream server would print a cancelled connection as an error
        finally:
            for pump in pumps:
                pump.cancel()
            for end in (request, writer):
                end.close()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, delay_s: float, paced: bool
    ) -> None:
        try:
            while chunk := await source.read(_CHUNK_BYTES):
                if delay_s:
                    await asyncio.sleep(delay_s)
                if paced:
                    await self._take_turn(len(chunk))
                sink.write(chunk)
                await sink.drain()
        except OSError:
            return  # one side is gone, and with it the connection

    async def _take_turn(self, num_bytes: int) -> None:
        now_s = self._loop.time()
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._bytes_per_s
        self._sent_bytes += num_bytes
        await asyncio.sleep(self._free_at_s - now_s)
