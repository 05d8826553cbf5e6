"""Clients that mean no good, or too many at once, beside one that only wants to read."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from cacheloader import fdpass
from cacheloader.errors import DaemonUnavailable
from cacheloader.protocol import frames, messages
from tests.support.node_daemon import REPOSITORY, NodeDaemon
from tests.support.shard_sets import ShardSet, write_shards
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.raw_client import RawClient

NUM_CLIENTS = 1000


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return write_shards(tmp_path_factory.mktemp("hostile") / "shards", num_shards=4, samples_per_shard=5)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., NodeDaemon]]:
    """Starts a shared daemon with a configuration; its log must hold no defect in the end."""
    with ExitStack() as stack:

        def start(config: str = "") -> NodeDaemon:
            path = tmp_path / "cacheloaderd.toml"
            path.write_text(f"allow_local_paths = true\n{config}")
            daemon = NodeDaemon(directory=tmp_path / "cache", private=False, arguments=["--config", str(path)])
            stack.callback(daemon.kill)
            return daemon.start()

        yield start
        log = (tmp_path / "cache.log").read_text()
        assert "Traceback" not in log
        assert "defect" not in log


def read_all(client: RawClient, shards: ShardSet) -> None:
    for number, path in enumerate(shards.paths):
        lease = client.acquire(number)
        assert lease.read() == path.read_bytes()
        lease.close()
        client.release(number)


@pytest.mark.timeout(600)
def test_a_thousand_clients_connect_at_once_and_each_gets_its_lease(
    start: Callable[..., NodeDaemon], shards: ShardSet
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 3 * NUM_CLIENTS + 200 + len(os.listdir("/proc/self/fd"))
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"this process may open {hard} files at most and needs {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    daemon = start()
    try:
        with ExitStack() as stack:
            first = stack.enter_context(daemon.connect())
            digest = first.open_dataset([shards.folder]).digest
            before = daemon.num_fds
            clients = []
            for _ in range(NUM_CLIENTS):
                clients.append(stack.enter_context(daemon.connect(greet=False)))
                clients[-1].say(messages.Hello(oldest=1, newest=1))  # at once: the daemon waits 10 s for it
                clients[-1].timeout_s = 100.0
                clients[-1].sock.settimeout(100.0)
            spec = fdpass.sealed_memory_file("spec", frames.encode(messages.DatasetSpec(urls=[str(shards.folder)])))
            for client in clients:
                assert isinstance(client.answer()[0], messages.Welcome)
                client.say(messages.OpenDataset(id=1, digest=digest), spec)
            os.close(spec)
            for number, client in enumerate(clients):
                _, manifest_fd = client.answer()
                assert manifest_fd is not None
                os.close(manifest_fd)
                client.say(messages.Acquire(id=2, shard=number % 4))
            contents = [path.read_bytes() for path in shards.paths]
            leases = [stack.enter_context(closing(client.hear_lease())) for client in clients]
            for number, lease in enumerate(leases):
                assert lease.read() == contents[number % 4]
            assert daemon.status()["connections"] == NUM_CLIENTS + 2
            assert sum(session["leases"] for session in daemon.status()["sessions"]) >= NUM_CLIENTS - 1
        wait_until(lambda: daemon.num_fds <= before, timeout_s=60)
        with daemon.connect() as client:
            client.open_dataset([shards.folder])
            read_all(client, shards)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_floods_and_never_reads_costs_a_bounded_queue_and_no_neighbour(
    start: Callable[..., NodeDaemon], shards: ShardSet
) -> None:
    daemon = start()
    with daemon.connect() as neighbour, ExitStack() as stack:
        neighbour.open_dataset([shards.folder])
        read_all(neighbour, shards)
        floods = [stack.enter_context(daemon.connect()) for _ in range(8)]
        before_bytes, before_fds = daemon.rss_bytes, daemon.num_fds
        for number, flood in enumerate(floods):
            flood.sock.settimeout(0.0)
            for message_id in range(1, 5000):
                request = messages.GetStatus(id=message_id) if number % 2 else messages.GetStatus(id=message_id % 7 + 1)
                try:
                    flood.say(request)
                except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                    break
            read_all(neighbour, shards)
        # Each status is a memory file: what waits for one client is bounded by the queue.
        assert daemon.num_fds <= before_fds + 8 * (64 + 32)
        assert daemon.rss_bytes <= before_bytes + 64 * 2**20
    wait_until(lambda: daemon.num_fds <= before_fds)


def test_what_comes_faster_than_a_limit_waits_unread_and_others_are_served(
    start: Callable[..., NodeDaemon], shards: ShardSet
) -> None:
    daemon = start("max_messages_per_s = 400\n")
    with daemon.connect() as flood, daemon.connect() as neighbour:
        flood.open_dataset([shards.folder])
        neighbour.open_dataset([shards.folder])
        started_s = time.monotonic()
        for clock in range(800):
            flood.advance(clock)
        read_all(neighbour, shards)
        flood.status()  # answered behind all of them
        assert time.monotonic() - started_s >= (800 - 400 * 0.25 - 10) / 400


def test_a_limit_of_bandwidth_holds(start: Callable[..., NodeDaemon], shards: ShardSet) -> None:
    size_bytes = shards.size_bytes
    daemon = start(f"max_bandwidth = {size_bytes}\nrange_size = 65536\n")
    started_s = time.monotonic()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])  # the scan that counts samples fetches all of it
        read_all(client, shards)
    assert time.monotonic() - started_s >= 1 - 0.25 - shards.shard_bytes / size_bytes


def test_a_tenants_limits_are_its_own(start: Callable[..., NodeDaemon], shards: ShardSet) -> None:
    daemon = start(
        f"""
        [[tenants]]
        name = "small"
        users = [{os.getuid()}]
        allow = ["{shards.folder}/"]
        max_connections = 2
        max_origin_requests_per_s = 8
        max_messages_per_s = 1000
        """
    )
    started_s = time.monotonic()
    with daemon.connect() as one, daemon.connect():
        with pytest.raises(
            DaemonUnavailable, match=r"tenant 'small' has as many .* \(max_connections=2 of that tenant\)"
        ):
            daemon.connect()
        one.open_dataset([shards.folder])
        read_all(one, shards)
        assert "cacheloader_tenant" not in one.status().decode()
    assert time.monotonic() - started_s >= (len(shards.paths) - 1) / 8 - 0.25
    wait_until(lambda: _connects(daemon))


def _connects(daemon: NodeDaemon) -> bool:
    try:
        daemon.connect().sock.close()
    except DaemonUnavailable:
        return False
    return True


def test_a_connection_that_a_fork_has_copied_ends_with_its_last_holder(
    start: Callable[..., NodeDaemon], shards: ShardSet
) -> None:
    daemon = start()
    program = """
import os, sys, time
from pathlib import Path
from tests.support.raw_client import RawClient
client = RawClient(Path(sys.argv[1]))
client.open_dataset([sys.argv[2]])
client.acquire(0)
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(daemon.socket), str(shards.folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon"},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert [session["leases"] for session in daemon.status()["sessions"]] == [1]
        parent.kill()
        parent.wait(60)
        # The child still holds the connection, and could read: its lease stands, and costs nobody else anything.
        assert [session["leases"] for session in daemon.status()["sessions"]] == [1]
        with daemon.connect() as client:
            client.open_dataset([shards.folder])
            read_all(client, shards)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()
    wait_until(lambda: daemon.status()["sessions"] == [])


def test_two_processes_that_write_to_one_connection_harm_nobody_else(
    start: Callable[..., NodeDaemon], shards: ShardSet
) -> None:
    """A fork that uses its parent's connection takes answers that were meant for it; the daemon tells a doubled id."""
    daemon = start()
    with daemon.connect() as neighbour, daemon.connect() as client:
        neighbour.open_dataset([shards.folder])
        client.open_dataset([shards.folder])
        copy = socket.socket(fileno=os.dup(client.sock.fileno()))
        with copy:
            for _ in range(2):
                fdpass.send(copy, frames.encode(messages.Acquire(id=7, shard=1)))
            read_all(neighbour, shards)
