"""The servers and the proxy that other tests take their numbers from."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.counting_proxy import CountingProxy, Fault
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.nginx import NginxServer
    from tests.support.seaweedfs import SeaweedServer


@pytest.fixture
def web_proxy(nginx: NginxServer) -> Iterator[CountingProxy]:
    proxy = CountingProxy(nginx.port).start()
    yield proxy
    proxy.stop()


def get(url: str, byte_range: str = "") -> bytes:
    request = urllib.request.Request(url, headers={"Range": byte_range} if byte_range else {})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


def test_the_proxy_counts_the_bytes_that_nginx_says_it_sent(nginx: NginxServer, web_proxy: CountingProxy, prefix: str):
    (nginx.root / prefix).mkdir()
    (nginx.root / prefix / "a b").write_bytes(b"x" * 300_000)
    url = f"{web_proxy.url}/{prefix}a%20b"
    assert len(get(url)) == 300_000
    assert len(get(url, "bytes=10-19")) == 10
    wait_until(lambda: web_proxy.in_flight == 0)
    expected = {f"/{prefix}a b": 300_010}
    assert web_proxy.body_bytes() == expected
    assert {path: sent for path, sent in nginx.body_bytes().items() if prefix in path} == expected


def test_the_proxy_limits_bandwidth_and_adds_latency(nginx: NginxServer, web_proxy: CountingProxy, prefix: str):
    (nginx.root / prefix).mkdir()
    (nginx.root / prefix / "x").write_bytes(b"x" * 400_000)
    web_proxy.latency_s, web_proxy.bandwidth_bytes_per_s = 0.1, 2_000_000.0
    started_s = time.monotonic()
    get(f"{web_proxy.url}/{prefix}x")
    assert time.monotonic() - started_s >= 0.29


def test_a_fault_hits_only_what_it_names_and_only_as_often(nginx: NginxServer, web_proxy: CountingProxy, prefix: str):
    (nginx.root / prefix).mkdir()
    for name in ("one", "two"):
        (nginx.root / prefix / name).write_bytes(b"whole")
    web_proxy.inject(Fault(action="status", times=1, status=500, path="one"))
    assert get(f"{web_proxy.url}/{prefix}two") == b"whole"
    with pytest.raises(urllib.error.HTTPError, match="500"):
        get(f"{web_proxy.url}/{prefix}one")
    assert get(f"{web_proxy.url}/{prefix}one") == b"whole"
    web_proxy.inject(Fault(action="ignore_range", times=1))
    assert get(f"{web_proxy.url}/{prefix}one", "bytes=0-1") == b"whole"
    assert get(f"{web_proxy.url}/{prefix}one", "bytes=0-1") == b"wh"


def test_signed_writes_and_reads_pass_the_proxy(
    s3_server: SeaweedServer, s3_proxy: CountingProxy, bucket: str, prefix: str
):
    client = s3_server.client(s3_proxy.url)
    client.put_object(Bucket=bucket, Key=f"{prefix}x", Body=b"12345" * 1000)
    assert client.get_object(Bucket=bucket, Key=f"{prefix}x")["Body"].read() == b"12345" * 1000


def test_a_restarted_s3_server_has_its_objects_on_the_same_port(
    s3_server: SeaweedServer, s3: Any, bucket: str, prefix: str
):
    s3.put_object(Bucket=bucket, Key=f"{prefix}x", Body=b"kept")
    port = s3_server.port
    s3_server.kill()
    s3_server.start()
    assert s3_server.port == port
    assert s3_server.client().get_object(Bucket=bucket, Key=f"{prefix}x")["Body"].read() == b"kept"
