"""Statistics as Prometheus text, over a real loopback socket."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

import pytest
from cacheloader_daemon import metrics
from cacheloader_daemon.account import Account, Histogram
from cacheloader_daemon.exposition import MetricsText, by
from cacheloader_daemon.metrics import MetricsServer, bind_loopback

from cacheloader.errors import ConfigError


async def fetched(port: int, request: bytes) -> bytes:
    """The response; nothing where the server closes the connection, which cuts off what it has not read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with suppress(ConnectionResetError, BrokenPipeError):
            await writer.wait_closed()


def test_a_histogram_is_cumulative_and_its_edges_are_inclusive() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.5, 1.0, 7.0):
        histogram.add(value)
    text = MetricsText()
    text.histogram("wait_seconds", "Waiting.", histogram.record())
    assert text.text().splitlines() == [
        "# HELP wait_seconds Waiting.",
        "# TYPE wait_seconds histogram",
        'wait_seconds_bucket{le="0.1"} 1',
        'wait_seconds_bucket{le="1.0"} 3',
        'wait_seconds_bucket{le="+Inf"} 4',
        "wait_seconds_sum 8.6",
        "wait_seconds_count 4",
    ]


def test_a_family_is_written_once() -> None:
    """A scraper refuses a page on which a family stands twice, and then the node has no metrics at all."""
    text = MetricsText()
    text.gauge("a", "A.", 1)
    with pytest.raises(AssertionError, match="the family a stands there already"):
        text.counter("a", "A.", 1)


def test_labels_are_escaped() -> None:
    text = MetricsText()
    text.gauge("a", "A.", by("reason", {'say "no"\\\n': 1}))
    assert text.text().splitlines()[-1] == r'a{reason="say \"no\"\\\n"} 1'


@pytest.mark.parametrize("wait_s", [math.nan, math.inf, -0.1])
def test_a_report_with_nonsense_is_counted_and_not_added(wait_s: float) -> None:
    account = Account()
    account.reported([0.5], 8)
    account.reported([0.5, wait_s], 8)
    account.reported([0.5], -1)
    record = account.record()
    assert (record.samples, record.invalid_reports) == (8, 2)
    assert (record.batch_wait_s.count, record.batch_wait_s.total) == (1, 0.5)


async def test_metrics_and_health_are_served_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 60.0)
    ready = [False]
    server = MetricsServer(metrics=lambda: "a 1\n", is_ready=lambda: ready[0])
    sock = bind_loopback(0)
    port = sock.getsockname()[1]
    await server.start(sock)
    with pytest.raises(ConfigError, match=f"metrics_port={port} cannot be used"):
        bind_loopback(port)
    try:
        response = await fetched(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert response.startswith(b"HTTP/1.0 200 OK\r\n")
        assert response.endswith(b"\r\n\r\na 1\n")
        assert b"503" in await fetched(port, b"GET /healthz HTTP/1.0\r\n\r\n")
        ready[0] = True
        assert b"200 OK" in await fetched(port, b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b"404" in await fetched(port, b"GET / HTTP/1.0\r\n\r\n")
        assert b"405" in await fetched(port, b"POST /metrics HTTP/1.0\r\n\r\n")
        assert await fetched(port, b"\xff\x00" * 9000) == b""
        assert await fetched(port, b"GET /met") == b""
    finally:
        await server.aclose()
        await server.aclose()
