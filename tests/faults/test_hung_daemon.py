"""A daemon that is stopped or hangs while its socket stays open: found out in seconds, read past, and come back to."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cacheloader.config import TransportOptions
from cacheloader.errors import DaemonUnavailable, DeadlineExceeded
from cacheloader.protocol.messages import DatasetSpec
from cacheloader.transport.base import AccessPlan
from cacheloader.transport.control import read_status, stop_daemon
from cacheloader.transport.open import open_transport
from tests.support.counting_proxy import Fault
from tests.support.patience import patient_enough
from tests.support.seaweedfs import storage_options
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.transport.daemon import DaemonTransport
    from tests.support.counting_proxy import CountingProxy
    from tests.support.node_daemon import NodeDaemon
    from tests.support.shard_sets import ShardSet

    Daemons = Callable[..., NodeDaemon]

SILENCE_S = 5.0
LONG_SILENCE_S = 8.0
"""Several signs of life fall into it, so that none is missed because the machine was busy for a moment."""


@pytest.fixture
def stopped_daemon(daemons: Daemons) -> Any:
    """A daemon under SIGSTOP; it goes on with the test's end."""
    daemon = daemons().start()
    stop(daemon)
    yield daemon
    os.kill(daemon.pid, signal.SIGCONT)


def stop(daemon: NodeDaemon) -> None:
    """SIGSTOP, and wait until it has taken hold: until then the daemon answers."""
    os.kill(daemon.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{daemon.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def session_with(daemon: NodeDaemon, **options: Any) -> DaemonTransport:
    return open_transport(TransportOptions(cache_dir=daemon.directory, **{"hello_timeout_s": SILENCE_S, **options}))


def read(session: DaemonTransport, shards: ShardSet, shard: int) -> str:
    lease = session.acquire(shard)
    assert lease.read(0, lease.size_bytes) == shards.paths[shard].read_bytes()
    lease.release()
    return lease.source


def follow_all(session: DaemonTransport) -> None:
    shards = np.arange(8, dtype=np.int32)
    session.follow(AccessPlan(first_clock=shards * 10, stop_clock=shards * 10 + 10, shard=shards, clock=0))


def test_a_new_job_does_not_wait_for_a_hanging_daemon_and_is_told_whom_to_wake(
    stopped_daemon: NodeDaemon, shards: ShardSet, caplog: pytest.LogCaptureFixture
) -> None:
    session = session_with(stopped_daemon)
    started_s = time.monotonic()
    session.open_dataset(DatasetSpec(urls=[str(shards.folder)]))
    follow_all(session)
    assert read(session, shards, 3) in {"origin", "memory"}
    assert time.monotonic() - started_s < 100
    assert session.statistics().route.is_away
    assert f"kill -CONT {stopped_daemon.pid}" in caplog.text
    assert "reads the origin" in caplog.text
    session.close()


def fill_queue(path: Path, stack: ExitStack) -> None:
    """As many connections as the kernel keeps for a daemon that accepts none."""
    while True:
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        waiting.setblocking(False)
        try:
            waiting.connect(str(path))
        except BlockingIOError:
            return


def test_a_new_job_does_not_wait_for_a_daemon_whose_queue_of_connections_is_full(
    stopped_daemon: NodeDaemon, shards: ShardSet, caplog: pytest.LogCaptureFixture
) -> None:
    """1. The daemon is stopped. 2. Clients knock until the kernel takes no more. 3. Another job starts."""
    with ExitStack() as stack:
        fill_queue(stopped_daemon.socket, stack)
        with pytest.raises(DeadlineExceeded, match="queue of them is full"):
            stop_daemon(stopped_daemon.directory, timeout_s=0.5)
        session = session_with(stopped_daemon)
        session.open_dataset(DatasetSpec(urls=[str(shards.folder)]))
        assert read(session, shards, 3) in {"origin", "memory"}
        session.close()
    assert f"(pid {stopped_daemon.pid}) hangs or was stopped, since it takes no connection" in caplog.text
    assert f"kill -CONT {stopped_daemon.pid}" in caplog.text


def test_a_shared_daemon_that_takes_no_connection_is_read_past_and_its_socket_named(
    tmp_path: Path, shards: ShardSet, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "shared.sock"
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(path))
        listener.listen(0)
        fill_queue(path, stack)
        session = open_transport(TransportOptions(daemon=f"unix://{path}", hello_timeout_s=SILENCE_S))
        session.open_dataset(DatasetSpec(urls=[str(shards.folder)]))
        assert read(session, shards, 3) in {"origin", "memory"}
        session.close()
    assert f"the daemon at unix://{path} hangs or was stopped" in caplog.text
    assert "ss -xlp names its process" in caplog.text


def test_a_running_job_leaves_a_hanging_daemon_and_returns_when_it_wakes(daemons: Daemons, shards: ShardSet) -> None:
    daemon = daemons().start()
    session = session_with(daemon)
    session.open_dataset(DatasetSpec(urls=[str(shards.folder)]))
    follow_all(session)
    read(session, shards, 0)
    stop(daemon)
    try:
        for shard in range(1, 8):
            read(session, shards, shard)
        route = session.statistics().route
        assert (route.is_away, route.fallbacks) == (True, 1)
        assert route.away_seconds > 0
    finally:
        os.kill(daemon.pid, signal.SIGCONT)

    def is_home() -> bool:
        read(session, shards, 5)
        return not session.statistics().route.is_away

    wait_until(is_home, timeout_s=60)
    wait_until(lambda: daemon.status()["account"]["fallbacks"] == 1)
    assert daemon.status()["account"]["away_seconds"] > 0
    session.close()
    wait_until(lambda: daemon.plan()["sessions"] == 0)
    assert daemon.stop() == 0


@pytest.mark.timeout(300)
def test_a_daemon_that_works_for_long_is_not_taken_for_one_that_hangs(
    daemons: Daemons, shards: ShardSet, s3: Any, bucket: str, prefix: str, s3_proxy: CountingProxy
) -> None:
    url = shards.upload(s3, bucket, prefix.rstrip("/"))
    daemon = daemons().start()
    session = session_with(daemon, hello_timeout_s=LONG_SILENCE_S)
    session.open_dataset(DatasetSpec(urls=[url], storage_options=storage_options(s3_proxy.url)))
    daemon.kill()
    for blob in daemon.blobs:
        blob.unlink()
    daemon.start()
    s3_proxy.latency_s = LONG_SILENCE_S + 2
    assert read(session, shards, 2) == "origin"
    assert session.statistics().route.fallbacks == 0
    session.close()


def test_status_and_stop_name_a_daemon_that_hangs(stopped_daemon: NodeDaemon) -> None:
    options = TransportOptions(cache_dir=stopped_daemon.directory)
    with pytest.raises(DaemonUnavailable, match=f"hangs or was stopped.*kill -CONT {stopped_daemon.pid}"):
        read_status(options, timeout_s=1)
    with pytest.raises(DeadlineExceeded, match="hangs or was stopped"):
        stop_daemon(stopped_daemon.directory, timeout_s=1)


@pytest.mark.timeout(300)
def test_a_wait_that_ends_without_a_shard_says_what_the_store_answered(
    daemons: Daemons, url: str, s3_proxy: CountingProxy
) -> None:
    """The store fails during a job whose patience ends before the daemon's retries do."""
    daemon = daemons().start()
    s3_proxy.inject(Fault(action="status", status=500, code="InternalError", path=".tar"))

    def error_within(timeout_s: float) -> str:
        with closing(session_with(daemon, hello_timeout_s=60, timeout_s=timeout_s)) as session:
            session.open_dataset(DatasetSpec(urls=[url], storage_options=storage_options(s3_proxy.url)))
            with pytest.raises(DeadlineExceeded) as caught:
                session.acquire(4)
            status = daemon.status()
            if "requests failed" in caught.value.message:
                assert status["degraded"] == ["origin"]
                assert "500 InternalError" in status["origin_troubles"][0]["message"]
            return caught.value.message

    seconds = (6.0, 20.0, 60.0)  # the news come every two seconds
    error = patient_enough(error_within, is_early=lambda error: "requests failed" not in error, seconds=seconds)
    assert re.search(r"shard-000004\.tar.*requests failed.*500 InternalError", error)
    s3_proxy.reset()
    with daemon.connect() as client:
        client.open_dataset([url], options=storage_options(s3_proxy.url))
        client.acquire(5).close()
    wait_until(lambda: daemon.status()["degraded"] == [])
