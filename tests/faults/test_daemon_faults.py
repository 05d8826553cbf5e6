"""Faults of the daemon, its clients, its disk and its workers; each test names the fault and the promise that holds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from cacheloader import fdpass
from cacheloader.protocol import frames, messages
from tests.support.counting_proxy import Fault
from tests.support.node_daemon import REPOSITORY, NodeDaemon, held_still, is_running
from tests.support.seaweedfs import storage_options
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.counting_proxy import CountingProxy
    from tests.support.raw_client import RawClient
    from tests.support.shard_sets import ShardSet

    Daemons = Callable[..., NodeDaemon]


def open_over(client: RawClient, url: str, proxy: CountingProxy) -> Any:
    return client.open_dataset([url], options=storage_options(proxy.url))


# The daemon dies.


def test_a_lease_outlives_eviction_and_the_daemon(daemons: Daemons, shards: ShardSet) -> None:
    """1. A shard is leased, and given back with its descriptors kept. 2. It is evicted. 3. The daemon is killed."""
    daemon = daemons(cache_size=str(3 * 2**20 + 2 * 2_700_000)).start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        lease = client.acquire(0)
        client.release(0)
        for shard in range(1, 8):
            client.acquire(shard).close()
            client.release(shard)
        wait_until(lambda: os.fstat(lease.data_fd).st_nlink == 0)  # it has no name left, wherever it was
        assert lease.read() == shards.paths[0].read_bytes()
        daemon.kill()
        assert lease.read() == shards.paths[0].read_bytes()
        assert lease.read_index()
        lease.close()


def test_a_daemon_killed_in_the_middle_of_a_fetch_leaves_no_wrong_blob(
    daemons: Daemons, shards: ShardSet, url: str, s3_proxy: CountingProxy
) -> None:
    """1. A shard's body stalls half way. 2. SIGKILL. 3. The next daemon removes the half and serves the whole."""
    daemon = daemons().start()
    with daemon.connect() as client:
        open_over(client, url, s3_proxy)
        client.acquire(1).close()
        s3_proxy.inject(Fault(action="stall", path="shard-000002", after_bytes=500_000))
        client.say(messages.Acquire(id=77, shard=2))
        wait_until(lambda: bool(daemon.partial_files) and s3_proxy.in_flight > 0)
        daemon.kill()
    assert daemon.partial_files
    s3_proxy.reset()
    daemon.start()
    assert not daemon.partial_files
    with daemon.connect() as client:
        open_over(client, url, s3_proxy)
        kept, fetched = client.acquire(1), client.acquire(2)
        assert (kept.leased.source, fetched.leased.source) == ("nvme", "origin")
        assert kept.read() == shards.paths[1].read_bytes()
        assert fetched.read() == shards.paths[2].read_bytes()
        kept.close()
        fetched.close()


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_whenever_a_daemon_is_killed_the_next_serves_what_the_origin_has(
    daemons: Daemons, shards: ShardSet, delay_s: float
) -> None:
    daemon = daemons().start()
    client = daemon.connect()
    client.say(messages.OpenDataset(id=1), _spec(shards.folder))
    time.sleep(delay_s)  # the moment of the fault, not a wait for something
    daemon.kill()
    client.sock.close()
    daemon.start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        for shard, path in enumerate(shards.paths):
            lease = client.acquire(shard)
            assert lease.read() == path.read_bytes()
            lease.close()
    assert daemon.stop() == 0


def test_workers_end_with_a_killed_daemon(daemons: Daemons, shards: ShardSet) -> None:
    daemon = daemons().start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        workers = daemon.children
        assert workers
        daemon.kill()
    wait_until(lambda: not any(is_running(pid) for pid in workers))


def test_leaving_right_after_reading_from_an_object_store_is_clean_every_time(
    daemons: Daemons, url: str, s3_proxy: CountingProxy
) -> None:
    """The engine's threads have aborted the process at such a moment; see ``origin.drain``."""
    for number in range(6):
        daemon = daemons(directory=daemons().directory.with_name(f"cache-{number}")).start()
        client = daemon.connect()
        open_over(client, url, s3_proxy)
        client.say(messages.Acquire(id=50, shard=number))
        client.say(messages.Acquire(id=51, shard=(number + 1) % 8))
        client.hear_lease().close()
        assert daemon.stop() == 0
        client.sock.close()
        assert "Traceback" not in daemon.log


# A client dies, or misbehaves.


def test_the_leases_of_a_killed_client_end_with_it(daemons: Daemons, shards: ShardSet) -> None:
    daemon = daemons().start()
    program = """
import sys, time
from pathlib import Path
from tests.support.raw_client import RawClient
client = RawClient(Path(sys.argv[1]))
client.open_dataset([sys.argv[2]])
client.follow(range(8), rows=10)
leases = [client.acquire(shard) for shard in range(3)]
print("leased", flush=True)
time.sleep(600)
"""
    client = subprocess.Popen(
        [sys.executable, "-c", program, str(daemon.socket), str(shards.folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon"},
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"leased\n"
        assert daemon.plan()["leased_shards"] == 3
    finally:
        client.kill()
        client.wait()
        client.stdout.close()
    wait_until(lambda: daemon.plan()["sessions"] == 0)
    assert daemon.plan()["leased_shards"] == 0


@pytest.mark.parametrize("nuisance", ["garbage", "flood", "never reads", "never says hello", "half a plan", "fd flood"])
def test_a_nuisance_costs_its_neighbours_nothing(daemons: Daemons, shards: ShardSet, nuisance: str) -> None:
    daemon = daemons().start()
    with daemon.connect() as good:
        good.open_dataset([shards.folder])
        for shard in range(8):  # warm
            good.acquire(shard).close()
            good.release(shard)
        # Both run on the same few cores, so only an order of magnitude tells a blocked loop from a busy one.
        limit_s = max(3.0, 20 * _slowest_acquire(good))
        before = daemon.num_fds
        stop = threading.Event()
        threads = [threading.Thread(target=_be_a_nuisance, args=(daemon, shards, nuisance, stop)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            # A machine that stands still does so once, and a nuisance is one all the time.
            disturbed_s = next(
                (slowest_s for _ in range(4) if (slowest_s := _slowest_acquire(good)) < limit_s), float("inf")
            )
        finally:
            stop.set()
            for thread in threads:
                thread.join(100)
        assert not any(thread.is_alive() for thread in threads)
        assert disturbed_s < limit_s
        wait_until(lambda: daemon.num_fds <= before + 2)
        assert "defect" not in daemon.log
    assert daemon.stop() == 0


def _slowest_acquire(client: RawClient) -> float:
    slowest_s = 0.0
    for turn in range(100):
        started_s = time.monotonic()
        client.acquire(turn % 8).close()
        slowest_s = max(slowest_s, time.monotonic() - started_s)
        client.release(turn % 8)
    return slowest_s


def _be_a_nuisance(daemon: NodeDaemon, shards: ShardSet, nuisance: str, stop: threading.Event) -> None:
    while not stop.is_set():
        client = daemon.connect(greet=nuisance not in {"garbage", "never says hello"})
        patience_s = client.timeout_s
        client.sock.settimeout(0.05)
        try:
            match nuisance:
                case "garbage":
                    client.say(os.urandom(1000))
                    client.hear()
                case "flood":
                    client.sock.settimeout(patience_s)
                    client.open_dataset([shards.folder])
                    client.sock.settimeout(0.05)
                    for number in range(5000):
                        client.say(messages.Advance(clock=number))
                case "never reads":
                    client.sock.settimeout(patience_s)
                    client.open_dataset([shards.folder])
                    client.sock.settimeout(0.05)
                    for number in range(1, 5000):
                        client.say(messages.Acquire(id=number + 10, shard=number % 8))
                case "never says hello":
                    stop.wait(0.2)
                case "half a plan":
                    fd = fdpass.sealed_memory_file("plan", b"x" * 19)
                    client.say(messages.FollowPlan(id=1, num_accesses=1, clock=0), fd)
                    os.close(fd)
                    client.hear()
                case "fd flood":
                    fd = os.open("/dev/null", os.O_RDONLY)
                    for number in range(500):
                        client.say(messages.GetStatus(id=number + 1), fd)
                    os.close(fd)
        except (OSError, EOFError):
            pass
        finally:
            client.sock.close()


# The disk fails.


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 8 MiB."""
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mountpoint)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a small file system")
    yield mountpoint
    subprocess.run(["umount", "--lazy", str(mountpoint)], check=True)


def test_a_full_disk_is_served_past_from_memory(daemons: Daemons, shards: ShardSet, small_disk: Path) -> None:
    """1. Something else fills the disk. 2. Shards come from memory, and the status says why. 3. Space comes back."""
    daemon = daemons(directory=small_disk / "cache", cache_size="1GiB").start()
    with (small_disk / "other").open("wb") as other:
        os.posix_fallocate(other.fileno(), 0, 6 * 2**20)
    with daemon.connect() as client:
        assert client.open_dataset([shards.folder]).total_samples == 160
        for shard, path in enumerate(shards.paths):
            lease = client.acquire(shard)
            assert lease.leased.source == "memory"
            assert lease.read() == path.read_bytes()
            assert fdpass.is_sealed(lease.data_fd)
            assert fdpass.is_sealed(lease.index_fd)
            lease.close()
            client.release(shard)
        wait_until(lambda: json.loads(client.status())["degraded"] == ["disk", "space"])
        assert json.loads(client.status())["plan"]["leased_shards"] == 0
        assert not daemon.blobs
        assert not daemon.partial_files
        (small_disk / "other").unlink()

        def is_cached_again() -> bool:
            lease = client.acquire(5)
            lease.close()
            client.release(5)
            return lease.leased.source != "memory"

        wait_until(is_cached_again, timeout_s=60)
    assert daemon.stop() == 0
    daemon.start()
    assert daemon.plan()["resident_shards"] == len(daemon.blobs) > 0


def test_readers_of_one_shard_past_the_disk_share_one_fetch(
    daemons: Daemons, shards: ShardSet, url: str, s3_proxy: CountingProxy, small_disk: Path
) -> None:
    daemon = daemons(directory=small_disk / "cache", cache_size="1GiB").start()
    with (small_disk / "other").open("wb") as other:
        os.posix_fallocate(other.fileno(), 0, 6 * 2**20)
    clients = [daemon.connect() for _ in range(5)]
    for client in clients:
        open_over(client, url, s3_proxy)
    s3_proxy.is_held = True
    for client in clients:
        client.say(messages.Acquire(id=60, shard=2))
        client.status()  # answered behind it: by then the daemon knows that this one wants the shard too
    s3_proxy.is_held = False
    for client in clients:
        lease = client.hear_lease()
        assert lease.leased.source == "memory"
        assert lease.read() == shards.paths[2].read_bytes()
        lease.close()
        client.sock.close()
    read = {path.rpartition("/")[2]: size_bytes for path, size_bytes in s3_proxy.body_bytes().items()}
    assert read["shard-000002.tar"] == shards.paths[2].stat().st_size


@pytest.mark.parametrize("where", ["below a file", "another user's", "another program's files"])
def test_a_directory_that_cannot_be_used_is_told_at_the_start(daemons: Daemons, tmp_path: Path, where: str) -> None:
    launcher: list[str] = []
    directory = tmp_path / "file" / "cache"
    if where == "below a file":
        (tmp_path / "file").write_text("x")
    elif where == "another program's files":
        directory.mkdir(parents=True)
        (directory / "thesis.tex").write_text("x")
    elif os.getuid() != 0:
        pytest.skip("needs root to become another user")
    else:
        directory.mkdir(parents=True)
        directory.chmod(0o700)
        launcher = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    daemon = NodeDaemon(directory=directory, launcher=launcher)
    daemon.__class__ = _DaemonWithLogElsewhere
    started_s = time.monotonic()
    line = daemon.try_start()
    assert line["error"] == "CacheUnusable"
    assert str(directory) in line["message"]
    assert daemon.exit_code() == 1
    assert time.monotonic() - started_s < 60


class _DaemonWithLogElsewhere(NodeDaemon):
    @property
    def log_path(self) -> Path:
        return self.directory.parent.parent / "daemon.log"


def test_a_blob_that_vanished_is_fetched_again(daemons: Daemons, shards: ShardSet) -> None:
    daemon = daemons().start()
    with daemon.connect() as client, daemon.connect() as other:
        client.open_dataset([shards.folder])
        other.open_dataset([shards.folder])
        client.acquire(0).close()
        client.release(0)
        for blob in daemon.blobs:
            blob.unlink()
        client.say(messages.Acquire(id=90, shard=0))
        other.say(messages.Acquire(id=90, shard=0))
        for reader in (client, other):
            lease = reader.hear_lease()
            assert lease.read() == shards.paths[0].read_bytes()
            lease.close()
        status = json.loads(client.status())
    assert status["plan"]["lost_blobs"] == 1, daemon.log + str(status)
    assert "defect" not in daemon.log


def test_a_directory_that_vanished_costs_the_cache_and_not_the_job(daemons: Daemons, shards: ShardSet) -> None:
    daemon = daemons().start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        client.acquire(0).close()
        with held_still(daemon.pid):  # which may make a file in a folder that was just emptied
            shutil.rmtree(daemon.directory)
        for shard, path in enumerate(shards.paths):
            lease = client.acquire(shard)
            assert lease.read() == path.read_bytes()
            lease.close()
    assert daemon.stop() == 0


# A worker dies.


def test_a_killed_index_worker_costs_a_second_try_and_no_error(
    daemons: Daemons, shards: ShardSet, url: str, s3_proxy: CountingProxy
) -> None:
    daemon = daemons().start()
    with daemon.connect() as client:
        open_over(client, url, s3_proxy)
        wait_until(lambda: bool(daemon.children))
        for shard in range(8):
            for pid in daemon.children:
                with suppress(ProcessLookupError):  # collected already: one that an earlier turn has killed
                    os.kill(pid, signal.SIGKILL)
            lease = client.acquire(shard)
            assert lease.read() == shards.paths[shard].read_bytes()
            lease.close()
        assert json.loads(client.status())["workers_lost"] > 0


# The origin stumbles.


def test_an_origin_that_stumbles_is_asked_again(
    daemons: Daemons, shards: ShardSet, url: str, s3_proxy: CountingProxy
) -> None:
    daemon = daemons().start()
    with daemon.connect() as client:
        open_over(client, url, s3_proxy)
        s3_proxy.inject(
            Fault(action="status", status=503, code="SlowDown", times=2, path=".tar"),
            Fault(action="reset", after_bytes=100_000, times=1, path=".tar"),
            Fault(action="shorten", after_bytes=100_000, times=1, path=".tar"),
        )
        for shard, path in enumerate(shards.paths):
            lease = client.acquire(shard)
            assert lease.read() == path.read_bytes()
            lease.close()
        assert json.loads(client.status())["account"]["fetch_failures"] == {}


def test_a_shard_that_vanished_from_the_origin_fails_alone_and_can_come_back(
    daemons: Daemons, shards: ShardSet, url: str, s3: Any, bucket: str, prefix: str, s3_proxy: CountingProxy
) -> None:
    daemon = daemons().start()
    with daemon.connect() as client:
        open_over(client, url, s3_proxy)
        s3_proxy.inject(Fault(action="status", status=404, code="NoSuchKey", path="shard-000004"))
        with pytest.raises(Exception, match=r"shard-000004\.tar"):
            client.acquire(4)
        client.acquire(5).close()
        s3_proxy.reset()
        lease = client.acquire(4)
        assert lease.read() == shards.paths[4].read_bytes()
        lease.close()
        assert json.loads(client.status())["account"]["fetch_failures"] == {"OriginNotFound": 1}


def _spec(folder: Path) -> int:
    return fdpass.sealed_memory_file("spec", frames.encode(messages.DatasetSpec(urls=[str(folder)])))
