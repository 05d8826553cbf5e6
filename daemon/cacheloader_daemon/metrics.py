"""The loopback HTTP port of ``/metrics`` and ``/healthz``.

Source: RFC 1945 (HTTP/1.0).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
REQUEST_TIMEOUT_S = 5.0
MAX_REQUEST_BYTES = 8192
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def bind_loopback(port: int) -> socket.socket:
    """A socket bound to ``port`` of loopback (0: any free one).

    Raises:
        ConfigError: The port is taken.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((LOOPBACK, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"metrics_port={port} cannot be used ({error.strerror}); choose another, or 0 for no metrics"
        ) from error
    return sock


class MetricsServer:
    """Answers ``GET /metrics`` and ``GET /healthz`` on loopback, one request a connection."""

    def __init__(self, *, metrics: Callable[[], str], is_ready: Callable[[], bool]) -> None:
        """Prepare.

        Args:
            metrics: Makes the exposition.
            is_ready: Whether ``/healthz`` is 200 (else 503): the socket listens and the index is open. A sick disk is
                degraded and still ready.
        """
        self._metrics = metrics
        self._is_ready = is_ready
        self._server: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> None:
        """Serve the bound socket ``sock``, owned from now on."""
        self._server = await asyncio.start_server(self._serve, sock=sock, limit=MAX_REQUEST_BYTES)

    async def aclose(self) -> None:
        """Stop listening; calling it again does nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except (asyncio.LimitOverrunError, asyncio.IncompleteReadError):
                    return
                writer.write(b"".join(self._response(head.split(b"\r\n", 1)[0])))
                await writer.drain()
        except (TimeoutError, OSError) as error:
            log.info("a reader of the metrics went away: %s", error)
        finally:
            writer.close()

    def _response(self, request_line: bytes) -> Iterator[bytes]:
        match request_line.split(b" "):
            case [b"GET", b"/metrics", _]:
                status, content_type, body = "200 OK", CONTENT_TYPE, self._metrics()
            case [b"GET", b"/healthz", _]:
                status, body = ("200 OK", "ready\n") if self._is_ready() else ("503 Service Unavailable", "not ready\n")
                content_type = "text/plain"
            case [b"GET", _, _]:
                status, content_type, body = "404 Not Found", "text/plain", "see /metrics and /healthz\n"
            case _:
                status, content_type, body = "405 Method Not Allowed", "text/plain", "only GET\n"
        content = body.encode()
        yield f"HTTP/1.0 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(content)}\r\n".encode()
        yield b"Connection: close\r\n\r\n"
        yield content
