"""A store on a bad day, in front of a real daemon: each test names the fault and the promise. See docs/faults.md."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cacheloader.config import TransportOptions
from cacheloader.errors import CorruptShard, OriginChanged, OriginDenied, OriginError
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.open import open_origin
from cacheloader.origin.retry import Backoff
from cacheloader.origin.slots import TransferSlots
from cacheloader.origin.transfer import TransferLimits, transfer
from cacheloader.protocol import messages
from cacheloader.protocol.messages import DatasetSpec
from cacheloader.transport.open import open_transport
from tests.support.counting_proxy import Fault
from tests.support.expiring_proxy import ExpiringProxy
from tests.support.fault_proxy import FaultProxy, passing_faults, unanswering_port
from tests.support.seaweedfs import KEYS, storage_options
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.node_daemon import NodeDaemon
    from tests.support.raw_client import RawClient
    from tests.support.seaweedfs import SeaweedServer
    from tests.support.shard_sets import ShardSet

    Daemons = Callable[..., NodeDaemon]

BODY = random.Random(1).randbytes(1_000_000)
LIMITS = TransferLimits(
    part_bytes=250_000, timeout_floor_s=1.0, slowest_bytes_per_s=10**9, deadline_s=100.0, backoff=Backoff(longest_s=0.2)
)


@pytest.fixture
def proxy(s3_server: SeaweedServer) -> Iterator[FaultProxy]:
    proxy = FaultProxy(s3_server.port)
    proxy.start()
    yield proxy
    proxy.stop()


def opened(daemon: NodeDaemon, url: str, proxy: FaultProxy) -> RawClient:
    client = daemon.connect()
    client.open_dataset([url], options=storage_options(proxy.url))
    return client


async def copied(url: str, info: ObjectInfo, limits: TransferLimits = LIMITS) -> bytes:
    """The object, brought as the daemon brings it."""
    origin = open_origin(info.uri, storage_options=storage_options(url))
    body = bytearray(info.size_bytes)

    async def write_at(offset: int, part: Any) -> None:
        body[offset : offset + memoryview(part).nbytes] = bytes(part)

    try:
        await transfer(origin, info, write_at, limits=limits, slots=TransferSlots(backoff=Backoff(longest_s=0.2)))
    finally:
        await origin.aclose()
    return bytes(body)


@pytest.fixture
def info(s3: Any, bucket: str, prefix: str) -> ObjectInfo:
    """An object of 1 MB."""
    put = s3.put_object(Bucket=bucket, Key=f"{prefix}object", Body=BODY)
    return ObjectInfo(uri=f"s3://{bucket}/{prefix}object", size_bytes=len(BODY), version=put["ETag"])


@pytest.mark.parametrize(
    "fault",
    [
        Fault(action="status", times=2, status=500, code="InternalError"),
        Fault(action="status", times=2, status=503, code="SlowDown"),
        Fault(action="status", times=2, status=429, code="TooManyRequests", retry_after_s=1),
        Fault(action="status", times=2, status=400, code="RequestTimeout"),
        Fault(action="reset", times=2, after_bytes=100_000),
        Fault(action="close", times=2, after_bytes=100_000),
        Fault(action="shorten", times=2, after_bytes=100_000),
        Fault(action="lengthen", times=2),
        Fault(action="stall", times=2, after_bytes=100_000),
        Fault(action="drip", times=2, after_bytes=100_000),
    ],
    ids=lambda fault: f"{fault.action} {fault.code}" if fault.action == "status" else fault.action,
)
async def test_a_request_that_fails_and_would_not_fail_again_is_asked_again(
    fault: Fault, proxy: FaultProxy, info: ObjectInfo
) -> None:
    proxy.inject(fault)
    assert await copied(proxy.url, info) == BODY


async def test_whatever_mixture_of_passing_faults_a_seed_draws_the_bytes_are_right(
    proxy: FaultProxy, info: ObjectInfo
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    proxy.draw_faults(seed, 0.4, passing_faults)
    # Five rounds make twenty requests, none of which meets a fault in one run of 27,000; more rounds do.
    for number in range(25):
        assert await copied(proxy.url, info) == BODY
        if number >= 4 and proxy.num_drawn:
            break
    assert proxy.num_drawn


@pytest.mark.parametrize("fault", ["refused", "unanswered", "unresolvable", "down for good"])
async def test_a_store_that_cannot_be_reached_is_an_error_within_its_deadline_that_names_it(
    fault: str, proxy: FaultProxy, info: ObjectInfo
) -> None:
    limits = TransferLimits(timeout_floor_s=1.0, deadline_s=3.0, backoff=Backoff(longest_s=0.2))
    started_s = time.monotonic()
    with unanswering_port() as port:
        endpoint = {
            "refused": "http://127.0.0.1:9",
            "unanswered": f"http://127.0.0.1:{port}",
            "unresolvable": "http://no-such-store.invalid",
            "down for good": proxy.url,
        }[fault]
        if fault == "down for good":
            proxy.go_down()
        with pytest.raises(OriginError) as caught:
            await copied(endpoint, info, limits)
    assert caught.value.retryable
    assert endpoint.removeprefix("http://") in caught.value.message or info.uri in caught.value.message
    assert time.monotonic() - started_s < 60
    if fault == "down for good":
        proxy.come_up()


async def test_an_object_that_changes_between_two_ranges_is_an_error_and_never_a_mixture(
    proxy: FaultProxy, info: ObjectInfo, s3: Any, bucket: str
) -> None:
    s3.put_object(Bucket=bucket, Key=info.uri.partition(f"{bucket}/")[2], Body=BODY[::-1])
    with pytest.raises(OriginChanged):
        await copied(proxy.url, info)


async def test_expired_credentials_are_an_error_at_once_that_says_so(proxy: FaultProxy, info: ObjectInfo) -> None:
    proxy.inject(Fault(action="status", status=403, code="ExpiredToken"))
    with pytest.raises(OriginDenied, match="ExpiredToken"):
        await copied(proxy.url, info)
    assert len(proxy.reads()) <= LIMITS.max_parallel


async def test_a_wrong_byte_in_transit_cannot_be_seen_by_the_transfer_alone(
    proxy: FaultProxy, info: ObjectInfo
) -> None:
    """Why docs/faults.md tells to use https: length and version are right, and there is nothing else to compare."""
    proxy.inject(Fault(action="flip", times=1, after_bytes=77))
    body = await copied(proxy.url, info, msgspec.structs.replace(LIMITS, timeout_floor_s=60.0))  # asked once
    assert sum(a != b for a, b in zip(body, BODY, strict=True)) == 1


# A daemon in front of it.


def test_an_outage_in_the_middle_of_a_job_is_named_and_then_over(
    daemons: Daemons, shards: ShardSet, url: str, proxy: FaultProxy
) -> None:
    """1. A job reads. 2. The store is gone. 3. The status says so. 4. It comes back, and every byte is right."""
    daemon = daemons().start()
    with opened(daemon, url, proxy) as client:
        client.acquire(0).close()
        with proxy.outage():
            client.say(messages.Acquire(id=91, shard=1))
            wait_until(lambda: daemon.status()["degraded"] == ["origin"], timeout_s=60)
        lease = client.hear_lease()
        assert lease.read() == shards.paths[1].read_bytes()
        lease.close()
        for shard in range(2, 8):
            lease = client.acquire(shard)
            assert lease.read() == shards.paths[shard].read_bytes()
            lease.close()
        status = daemon.status()
        assert (status["degraded"], status["account"]["fetch_failures"]) == ([], {})


def test_wrong_bytes_that_the_format_sees_are_fetched_once_more_and_never_kept(
    daemons: Daemons, shards: ShardSet, url: str, proxy: FaultProxy
) -> None:
    daemon = daemons().start()
    with opened(daemon, url, proxy) as client:
        in_a_tar_header = Fault(action="flip", after_bytes=150, path="shard-000003", times=1)
        proxy.inject(in_a_tar_header)
        lease = client.acquire(3)
        assert lease.read() == shards.paths[3].read_bytes()
        lease.close()
        assert daemon.status()["account"]["fetch_failures"] == {"CorruptShard": 1}
        proxy.inject(Fault(action="flip", after_bytes=150, path="shard-000004"))
        with pytest.raises(CorruptShard, match="shard-000004"):
            client.acquire(4)
        proxy.reset()
        lease = client.acquire(4)
        assert lease.read() == shards.paths[4].read_bytes()
        lease.close()


def test_a_session_with_fresh_credentials_helps_one_whose_have_expired(
    daemons: Daemons, shards: ShardSet, url: str, proxy: FaultProxy
) -> None:
    daemon = daemons().start()
    with opened(daemon, url, proxy) as old, daemon.connect() as new:
        new.open_dataset([url], options=storage_options(proxy.url, use_ssl=False))  # to the daemon, other credentials
        proxy.inject(Fault(action="status", status=403, code="ExpiredToken", times=1, path=".tar"))
        lease = old.acquire(2)
        assert lease.read() == shards.paths[2].read_bytes()
        lease.close()


def test_keys_that_end_in_the_middle_of_a_job_are_renewed_and_the_job_goes_on(
    daemons: Daemons, shards: ShardSet, url: str, s3_server: SeaweedServer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """1. A job reads with the keys of a file. 2. They end. 3. Somebody has put others there. 4. Nobody notices."""
    keys = tmp_path / "credentials"
    first, second = list(KEYS)[:2]

    def write(key: str) -> None:
        keys.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {KEYS[key]}\n")

    gate = ExpiringProxy(s3_server.port)
    gate.start()
    try:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
        monkeypatch.setenv("AWS_ENDPOINT_URL", gate.url)
        write(first)
        daemon = daemons().start()
        session = open_transport(TransportOptions(cache_dir=daemon.directory, hello_timeout_s=60))
        session.open_dataset(DatasetSpec(urls=[url]))
        write(second)
        gate.requests_left[first] = 3
        for number, path in enumerate(shards.paths):
            lease = session.acquire(number)
            assert lease.read(0, lease.size_bytes) == path.read_bytes()
            lease.release()
        assert gate.refused[first] > 0
        assert daemon.status()["account"]["fetch_failures"] == {}
        session.close()
    finally:
        gate.stop()


@pytest.mark.parametrize("wish", ["a request", "a plan"])
def test_a_fetch_that_nobody_wants_any_more_ends_with_its_space(
    daemons: Daemons, shards: ShardSet, url: str, proxy: FaultProxy, wish: str
) -> None:
    """1. A client wants shards of a store that has stopped sending. 2. It goes away. 3. Another reads what it likes."""
    daemon = daemons().start()
    proxy.inject(Fault(action="stall", path="shard-000006", after_bytes=100_000))
    with opened(daemon, url, proxy) as other:
        client = opened(daemon, url, proxy)
        if wish == "a plan":
            client.follow([6])
        else:
            client.say(messages.Acquire(id=70, shard=6))
        wait_until(lambda: bool(daemon.partial_files) and proxy.in_flight > 0)
        client.sock.close()
        wait_until(lambda: daemon.plan()["fetching_shards"] == 0, timeout_s=10)
        assert daemon.plan()["reserved_bytes"] == 0
        assert not daemon.partial_files
        proxy.reset()
        lease = other.acquire(6)
        assert lease.read() == shards.paths[6].read_bytes()
        lease.close()
    assert daemon.stop() == 0
    assert "defect" not in daemon.log
