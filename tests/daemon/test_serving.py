"""What a client gets from a real daemon: data sets, shards, and errors that say what to do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cacheloader import fdpass
from cacheloader.errors import (
    ConfigError,
    CorruptShard,
    DaemonError,
    DatasetError,
    EmptyDataset,
    OriginChanged,
    OriginDenied,
    OriginError,
    OriginNotFound,
    ProtocolError,
    QuotaTooSmall,
    StateMismatch,
)
from cacheloader.formats.base import index_samples
from cacheloader.protocol import frames, messages
from tests.support.cache_meter import disk_bytes
from tests.support.node_daemon import NodeDaemon, held_still
from tests.support.seaweedfs import storage_options
from tests.support.shard_sets import ShardSet, write_shards
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.counting_proxy import CountingProxy
    from tests.support.raw_client import RawClient

    Daemons = Callable[..., NodeDaemon]


@pytest.fixture
def daemon(daemons: Daemons) -> NodeDaemon:
    """A daemon of the test's own."""
    return daemons().start()


@pytest.fixture(scope="module")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeDaemon]:
    """One daemon for the tests that neither count nor break anything, and so show that clients leave no traces."""
    daemon = NodeDaemon(directory=tmp_path_factory.mktemp("long-lived") / "cache").start()
    yield daemon
    assert "defect" not in daemon.log
    assert daemon.stop() == 0


@pytest.fixture
def url(shards: ShardSet, s3: Any, bucket: str, prefix: str) -> str:
    """The data set in the object store, without sample counts beside it."""
    return shards.upload(s3, bucket, prefix.rstrip("/"))


@pytest.fixture
def counted_url(shards: ShardSet, url: str, s3: Any, bucket: str, prefix: str) -> str:
    """The data set in the object store, with its sample counts, so that opening it fetches no shard."""
    counts = {path.name: 10 for path in shards.paths}
    s3.put_object(Bucket=bucket, Key=f"{prefix}sizes.json", Body=json.dumps(counts).encode())
    return url


@pytest.fixture
def folder(shards: ShardSet, tmp_path: Path) -> Path:
    """A copy of the data set that a test may damage."""
    return Path(shutil.copytree(shards.folder, tmp_path / "data"))


def shard_bytes(proxy: CountingProxy) -> int:
    """Bytes of shards that left the server."""
    return sum(size_bytes for path, size_bytes in proxy.body_bytes().items() if path.endswith(".tar"))


def open_over(client: RawClient, url: str, proxy: CountingProxy, **options: Any) -> Any:
    return client.open_dataset([url], options=storage_options(proxy.url), **options)


# Shards.


def test_every_shard_is_what_the_origin_has_and_its_index_counts_its_samples(
    long_lived: NodeDaemon, shards: ShardSet
) -> None:
    with long_lived.connect() as client:
        manifest = client.open_dataset([shards.folder])
        assert manifest.total_samples == len(shards.digests)
        for shard, path in enumerate(shards.paths):
            lease = client.acquire(shard)
            assert lease.read() == path.read_bytes()
            assert index_samples(lease.read_index()) == manifest.num_samples[shard] == 10
            lease.close()


def test_leased_descriptors_cannot_be_written(long_lived: NodeDaemon, shards: ShardSet) -> None:
    with long_lived.connect() as client:
        client.open_dataset([shards.folder])
        lease = client.acquire(0)
        for fd in (lease.data_fd, lease.index_fd):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(fd, b"x", 0)
        lease.close()
    assert all(blob.stat().st_mode & 0o777 == 0o440 for blob in long_lived.blobs)


def test_clients_that_ask_for_one_shard_at_once_cause_one_fetch(
    daemon: NodeDaemon, shards: ShardSet, counted_url: str, s3_proxy: CountingProxy
) -> None:
    clients = [daemon.connect() for _ in range(6)]
    for client in clients:
        open_over(client, counted_url, s3_proxy)
    assert shard_bytes(s3_proxy) == 0
    with held_still(daemon.pid):
        for client in clients:
            client.say(messages.Acquire(id=client.next_id(), shard=3))
    leases = [client.hear_lease() for client in clients]
    assert {lease.read() for lease in leases} == {shards.paths[3].read_bytes()}
    assert {lease.leased.source for lease in leases} == {"origin"}
    assert shard_bytes(s3_proxy) == shards.paths[3].stat().st_size
    plan = daemon.plan()
    assert (plan["misses"], plan["coalesced"], plan["demand_fetches"]) == (1, 5, 1)
    for lease, client in zip(leases, clients, strict=True):
        lease.close()
        client.sock.close()


def test_a_followed_plan_is_fetched_ahead_and_then_hit(
    daemon: NodeDaemon, shards: ShardSet, counted_url: str, s3_proxy: CountingProxy
) -> None:
    with daemon.connect() as client:
        open_over(client, counted_url, s3_proxy)
        client.follow(range(8), rows=10)
        wait_until(lambda: daemon.plan()["resident_shards"] == 8)
        for shard in range(8):
            lease = client.acquire(shard)
            assert lease.leased.source == "nvme"
            lease.close()
            client.release(shard)
            client.advance((shard + 1) * 10)
    assert shard_bytes(s3_proxy) == shards.size_bytes
    plan = daemon.plan()
    assert (plan["hits"], plan["misses"], plan["prefetches"]) == (8, 0, 8)


def test_the_scan_that_counts_samples_warms_the_cache(
    daemon: NodeDaemon, shards: ShardSet, url: str, s3_proxy: CountingProxy
) -> None:
    with daemon.connect() as client:
        open_over(client, url, s3_proxy)
        assert shard_bytes(s3_proxy) == shards.size_bytes
        stages = {seen.stage for seen in client.progress}
        stages.discard("opening")  # a sign of life, where it takes long until the listing begins
        assert stages == {"listing", "counting samples"}
        assert client.progress[-1].done == client.progress[-1].total == 8
        for shard in range(8):
            client.acquire(shard).close()
    assert shard_bytes(s3_proxy) == shards.size_bytes


def test_a_restarted_daemon_finds_its_cache_warm(
    daemon: NodeDaemon, shards: ShardSet, url: str, s3_proxy: CountingProxy
) -> None:
    with daemon.connect() as client:
        digest = open_over(client, url, s3_proxy).digest
    assert daemon.stop() == 0
    s3_proxy.reset()
    daemon.start()
    with daemon.connect() as client:
        assert open_over(client, url, s3_proxy).digest == digest
        for shard, path in enumerate(shards.paths):
            lease = client.acquire(shard)
            assert lease.leased.source == "nvme"
            assert lease.read() == path.read_bytes()
            lease.close()
    assert shard_bytes(s3_proxy) == 0


def test_a_data_set_larger_than_the_cache_is_read_whole_within_the_quota(
    daemons: Daemons, shards: ShardSet, tmp_path: Path
) -> None:
    big = write_shards(tmp_path / "big", num_shards=12, samples_per_shard=10, sample_bytes=50_000)
    overhead_bytes = 3 * 2**20
    daemon = daemons(cache_size=str(overhead_bytes + 4 * (big.shard_bytes * 9 // 8 + 2**17))).start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])  # by now a shard is not held up by the start of what indexes it
    with daemon.connect() as client:
        manifest = client.open_dataset([big.folder])
        assert manifest.total_samples == 120
        client.follow([*range(12), *range(12)], rows=10)
        for step in range(24):
            lease = client.acquire(step % 12)
            assert lease.read() == big.paths[step % 12].read_bytes()
            lease.close()
            client.release(step % 12)
            client.advance((step + 1) * 10)
            with held_still(daemon.pid):  # else what goes while we add up is counted beside what comes in its place
                assert disk_bytes(daemon.directory) <= int(daemon.cache_size)
        plan = daemon.plan()
    assert plan["evictions"] > 0
    assert plan["memory_serves"] == 0


# Data sets.


def test_ranks_that_open_one_data_set_together_list_it_once_and_a_later_job_asks_again(
    daemon: NodeDaemon, counted_url: str, s3_proxy: CountingProxy
) -> None:
    s3_proxy.latency_s = 1.0  # while the first of them waits for the store, the daemon hears the others
    clients = [daemon.connect() for _ in range(16)]
    with held_still(daemon.pid):
        for client in clients:
            client.ask_for_dataset([counted_url], options=storage_options(s3_proxy.url))
    digests = [client.hear_dataset().digest for client in clients]
    s3_proxy.latency_s = 0.0

    def num_listings() -> int:
        return sum("list-type=" in seen.path for seen in s3_proxy.exchanges)

    assert num_listings() == 1
    with daemon.connect() as late:
        digests.append(open_over(late, counted_url, s3_proxy).digest)
    assert num_listings() == 2
    assert len(set(digests)) == 1
    for client in clients:
        client.sock.close()


def test_an_opening_goes_on_for_the_others_when_one_client_leaves(
    long_lived: NodeDaemon, url: str, s3_proxy: CountingProxy
) -> None:
    """1. Two clients open a slow data set. 2. The one that came first leaves. 3. The other gets it all the same."""
    s3_proxy.latency_s = 0.2
    first, second = long_lived.connect(), long_lived.connect()
    spec = frames.encode(messages.DatasetSpec(urls=[url], storage_options=storage_options(s3_proxy.url)))
    for client in (first, second):
        fd = fdpass.sealed_memory_file("spec", spec)
        client.say(messages.OpenDataset(id=1), fd)
        os.close(fd)
    wait_until(lambda: s3_proxy.in_flight > 0)
    first.sock.close()
    reply, fd = second.answer()
    assert isinstance(reply, messages.DatasetReady)
    assert fd is not None
    os.close(fd)
    second.sock.close()


def test_an_opening_that_nobody_waits_for_any_more_is_given_up(
    daemon: NodeDaemon, url: str, s3_proxy: CountingProxy
) -> None:
    s3_proxy.latency_s = 0.3
    spec = frames.encode(messages.DatasetSpec(urls=[url], storage_options=storage_options(s3_proxy.url)))
    fd = fdpass.sealed_memory_file("spec", spec)
    with daemon.connect() as client:
        client.say(messages.OpenDataset(id=1), fd)
        wait_until(lambda: daemon.plan()["sessions"] == 1)  # the scan has begun
    os.close(fd)
    wait_until(lambda: daemon.plan()["sessions"] == 0)
    with daemon.connect() as client:
        s3_proxy.reset()
        assert len(open_over(client, url, s3_proxy)) == 8


def test_a_known_digest_is_opened_without_asking_the_origin(
    daemon: NodeDaemon, counted_url: str, s3_proxy: CountingProxy
) -> None:
    with daemon.connect() as client:
        digest = open_over(client, counted_url, s3_proxy).digest
    assert daemon.stop() == 0
    daemon.start()
    s3_proxy.reset()
    with daemon.connect() as client:
        assert open_over(client, counted_url, s3_proxy, digest=digest).digest == digest
    assert not s3_proxy.exchanges


def test_a_digest_that_is_no_longer_true_is_refused_naming_both(long_lived: NodeDaemon, folder: Path) -> None:
    unknown = "0" * 32
    with long_lived.connect() as client, pytest.raises(StateMismatch) as caught:
        client.open_dataset([folder], digest=unknown)
    assert unknown in caught.value.message
    with long_lived.connect() as client:
        digest = client.open_dataset([folder]).digest
    assert digest in caught.value.message


def test_wrong_counts_beside_the_shards_are_found_when_a_shard_is_read(daemon: NodeDaemon, folder: Path) -> None:
    (folder / "sizes.json").write_text(json.dumps({path.name: 11 for path in folder.glob("*.tar")}))
    with daemon.connect() as client:
        client.open_dataset([folder])
        with pytest.raises(DatasetError, match=r"shard-000002\.tar holds 10 samples, and 11 .*sizes\.json"):
            client.acquire(2)
        with pytest.raises(DatasetError):  # found in the cache it is no better
            client.acquire(2)
    wait_until(lambda: daemon.plan()["leased_shards"] == 0)


def test_progress_is_told_at_most_ten_times_a_second(long_lived: NodeDaemon, tmp_path: Path) -> None:
    many = write_shards(tmp_path / "many", num_shards=150, samples_per_shard=1, sample_bytes=100)
    with long_lived.connect() as client:
        started_s = time.monotonic()
        client.open_dataset([many.folder])
        seconds = time.monotonic() - started_s
    assert len(client.progress) <= 10 * seconds + seconds / messages.HEARTBEAT_S + 5
    assert client.progress[-1].done == 150


def test_the_status_names_what_is_read_and_holds_no_secret(
    daemon: NodeDaemon, counted_url: str, s3_proxy: CountingProxy
) -> None:
    with daemon.connect() as client:
        open_over(client, counted_url, s3_proxy)
        client.acquire(0).close()
        text = client.status()
    (session,) = json.loads(text)["sessions"]
    assert session["uri"] == f"{counted_url}shard-000000.tar"
    assert (session["num_shards"], session["leases"], session["waiting"]) == (8, 1, 0)
    secret = str(storage_options(s3_proxy.url)["secret"])
    assert secret not in text.decode()
    assert secret not in daemon.log


# Errors.


def test_a_truncated_shard_is_refused_by_name_and_the_others_are_not(daemon: NodeDaemon, folder: Path) -> None:
    (folder / "sizes.json").write_text(json.dumps({path.name: 10 for path in folder.glob("*.tar")}))
    victim = sorted(folder.glob("*.tar"))[3]
    os.truncate(victim, victim.stat().st_size - 15_000)
    with daemon.connect() as client:
        client.open_dataset([folder])
        with pytest.raises(CorruptShard, match=r"shard-000003\.tar"):
            client.acquire(3)
        client.acquire(4).close()
    (folder / "sizes.json").unlink()  # and the scan finds it too
    with daemon.connect() as client, pytest.raises(CorruptShard, match=r"shard-000003\.tar"):
        client.open_dataset([folder / "*.tar"])
    wait_until(lambda: daemon.plan()["fetching_shards"] == 0)
    assert len(daemon.blobs) < 8
    assert not daemon.partial_files


def test_a_shard_that_changed_since_the_manifest_is_never_mixed(long_lived: NodeDaemon, folder: Path) -> None:
    (folder / "sizes.json").write_text(json.dumps({path.name: 10 for path in folder.glob("*.tar")}))
    with long_lived.connect() as client:
        client.open_dataset([folder])
        victim = sorted(folder.glob("*.tar"))[1]
        victim.write_bytes(victim.read_bytes())
        os.utime(victim, (1, 1))
        with pytest.raises(OriginChanged, match=r"shard-000001\.tar"):
            client.acquire(1)


@pytest.mark.timeout(300)
def test_what_cannot_be_reached_is_a_typed_error_within_ten_seconds(
    long_lived: NodeDaemon, bucket: str, prefix: str, s3_proxy: CountingProxy, url: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # so that its port is taken, and nobody listens there
        good = storage_options(s3_proxy.url)
        cases: list[tuple[str, dict[str, object], type[Exception]]] = [
            (url, storage_options(s3_proxy.url, secret="wrong"), OriginDenied),
            (f"s3://{bucket}/{prefix}none-{{0..3}}.tar", good, OriginNotFound),
            (f"s3://{bucket}/nothing-{prefix}", good, EmptyDataset),
            ("s3://no-such-bucket-here/x/", good, OriginError),
            (url, storage_options(f"http://127.0.0.1:{nobody.getsockname()[1]}"), OriginError),
            (f"{tmp_path}/empty/", {}, EmptyDataset),
            (f"{tmp_path}/missing/", {}, (OriginNotFound, EmptyDataset)),  # type: ignore[list-item]
            ("relative/path", {}, ConfigError),
            ("weird://x/y/", {}, ConfigError),
            (url, {**good, "no_such_option": 1}, ConfigError),
        ]
        for case, options, expected in cases:
            # A pause of the machine makes it longer, and nothing makes it shorter than the daemon's patience is.
            shortest_s = float("inf")
            for _ in range(4):
                started_s = time.monotonic()
                with long_lived.connect() as client, pytest.raises(expected):
                    client.open_dataset([case], options=options)
                shortest_s = min(shortest_s, time.monotonic() - started_s)
                if shortest_s < 10:
                    break
            assert shortest_s < 10, case
    assert "defect" not in long_lived.log


def test_a_plan_that_needs_more_than_the_cache_holds_is_refused_with_the_arithmetic(
    daemons: Daemons, shards: ShardSet
) -> None:
    daemon = daemons(cache_size=str(3 * 2**20)).start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        block = np.zeros(8, "<i8").tobytes() + np.full(8, 100, "<i8").tobytes() + np.arange(8, dtype="<i4").tobytes()
        fd = fdpass.sealed_memory_file("plan", block)
        with pytest.raises(QuotaTooSmall, match=r"the cache may hold 3\.0 MiB .* pass a cache_size of at least \d+"):
            client.ask(messages.FollowPlan(id=50, num_accesses=8, clock=0), fd)
        os.close(fd)
        client.follow(range(8), rows=10)  # one after the other they fit


# Rules of the wire.


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (messages.Acquire(id=9, shard=8), "shard 8 of a data set of 8"),
        (messages.Acquire(id=9, shard=-1), "shard -1 of a data set of 8"),
        (messages.Acquire(id=9, shard=2**40), "of a data set of 8"),
    ],
)
def test_a_shard_that_is_not_there_is_refused_and_the_session_goes_on(
    long_lived: NodeDaemon, shards: ShardSet, request_: messages.Acquire, message: str
) -> None:
    with long_lived.connect() as client:
        client.open_dataset([shards.folder])
        with pytest.raises(ProtocolError, match=message):
            client.ask(request_)
        client.acquire(0).close()


@pytest.mark.parametrize(
    "broken",
    [
        messages.Release(shard=0),
        messages.Release(shard=-5),
        messages.Advance(clock=-1),
        messages.Advance(clock=2**63),
        messages.Hello(oldest=1, newest=1),
        messages.GetStatus(id=0),
        messages.OpenDataset(id=5),
        b"garbage",
    ],
    ids=repr,
)
def test_a_client_that_breaks_the_rules_is_told_and_closed(
    long_lived: NodeDaemon, shards: ShardSet, broken: messages.Request | bytes
) -> None:
    with long_lived.connect() as client, long_lived.connect() as other:
        client.open_dataset([shards.folder])
        other.open_dataset([shards.folder])
        client.say(broken)
        reply, _ = client.hear()
        assert isinstance(reply, messages.Failed)
        assert (reply.id, reply.kind) == (0, "ProtocolError")
        with pytest.raises(EOFError):
            client.hear()
        other.acquire(0).close()
    assert "defect" not in long_lived.log


@pytest.mark.parametrize("kind", ["not sealed", "too short", "empty", "a pipe", "not sorted", "beyond the data set"])
def test_a_plan_that_is_no_plan_is_refused(long_lived: NodeDaemon, shards: ShardSet, kind: str) -> None:
    first, stop, shard = np.arange(4, dtype="<i8"), np.arange(1, 5, dtype="<i8"), np.arange(4, dtype="<i4")
    if kind == "not sorted":
        first, stop = first[::-1], stop[::-1]
    if kind == "beyond the data set":
        shard = shard + np.int32(5)
    block = first.tobytes() + stop.tobytes() + shard.tobytes()
    fd = fdpass.sealed_memory_file("plan", {"too short": block[:-1], "empty": b""}.get(kind, block))
    if kind == "not sealed":
        os.close(fd)
        fd = os.memfd_create("plan")
        os.write(fd, block)
    if kind == "a pipe":
        os.close(fd)
        fd, writer = os.pipe()
        os.close(writer)
    with long_lived.connect() as client:
        client.open_dataset([shards.folder])
        with pytest.raises(ProtocolError):
            client.ask(messages.FollowPlan(id=9, num_accesses=4, clock=0), fd)
        os.close(fd)
        client.follow(range(4))


def test_a_second_data_set_on_one_connection_is_refused(long_lived: NodeDaemon, shards: ShardSet) -> None:
    with long_lived.connect() as client:
        client.open_dataset([shards.folder])
        with pytest.raises(ProtocolError, match="one connection reads one data set"):
            client.open_dataset([shards.folder])


def test_a_failed_opening_may_be_tried_again(long_lived: NodeDaemon, shards: ShardSet, tmp_path: Path) -> None:
    with long_lived.connect() as client:
        with pytest.raises(ConfigError):
            client.open_dataset(["relative"])
        assert len(client.open_dataset([shards.folder])) == 8


def test_clients_that_leave_right_after_naming_a_data_set_leave_no_descriptor(daemon: NodeDaemon) -> None:
    with daemon.connect() as client, pytest.raises(OriginNotFound):
        client.open_dataset(["/nonexistent/"])  # whatever the first opening keeps open is open now
    before = daemon.num_fds
    fd = fdpass.sealed_memory_file("spec", frames.encode(messages.DatasetSpec(urls=["/nonexistent/"])))
    for _ in range(50):
        with daemon.connect() as client:
            client.say(messages.OpenDataset(id=1), fd)
    os.close(fd)
    wait_until(lambda: daemon.num_fds <= before)


def test_a_name_that_is_no_text_is_told_and_not_waited_for(daemon: NodeDaemon, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/bad\xff.tar.gz")).write_bytes(b"x")
    with daemon.connect() as client, pytest.raises(ConfigError, match=r"bad\\udcff"):
        client.open_dataset([f"{folder}/"])


def test_a_kept_manifest_that_cannot_be_opened_is_made_anew(daemon: NodeDaemon, shards: ShardSet) -> None:
    with daemon.connect() as client:
        digest = client.open_dataset([shards.folder]).digest
    manifest = daemon.directory / "manifests" / digest
    manifest.unlink()
    manifest.symlink_to(shards.paths[0])  # opened without following links: ELOOP
    with daemon.connect() as client:
        assert client.open_dataset([shards.folder], digest=digest).digest == digest
    assert "defect" not in daemon.log


def test_requests_before_a_data_set_is_open_are_refused(long_lived: NodeDaemon) -> None:
    with long_lived.connect() as client:
        with pytest.raises(ProtocolError, match="Acquire came before a data set was opened"):
            client.acquire(0)
        assert client.status()


def test_more_open_requests_than_allowed_are_refused_one_by_one(
    long_lived: NodeDaemon, counted_url: str, s3_proxy: CountingProxy
) -> None:
    with long_lived.connect() as client:
        open_over(client, counted_url, s3_proxy)
        s3_proxy.is_held = True
        for number in range(300):
            client.say(messages.Acquire(id=1000 + number, shard=0))
        refused = 0
        while refused < 44:
            with pytest.raises(DaemonError, match="256 requests of this connection wait"):
                client.answer()
            refused += 1
        s3_proxy.is_held = False
        leases = [client.hear_lease() for _ in range(256)]
        assert len({lease.leased.id for lease in leases}) == 256
        for lease in leases:
            lease.close()


def test_a_shared_daemon_reads_no_local_files_unless_told_to(daemons: Daemons, shards: ShardSet) -> None:
    daemon = daemons(private=False).start()
    with daemon.connect() as client, pytest.raises(ConfigError, match="allow_local_paths"):
        client.open_dataset([shards.folder])
    assert daemon.stop() == 0
    config = daemon.directory.with_suffix(".toml")
    config.write_text("allow_local_paths = true\n")
    daemon.arguments = ["--config", str(config)]
    daemon.start()
    with daemon.connect() as client:
        assert len(client.open_dataset([shards.folder])) == 8


def test_a_clients_own_variables_reach_a_private_daemon_only(
    daemons: Daemons, url: str, s3_proxy: CountingProxy, tmp_path: Path
) -> None:
    options = storage_options(s3_proxy.url)
    config = tmp_path / "cacheloaderd.toml"
    config.write_text(f'allowed_endpoints = ["{s3_proxy.url}"]\n')
    environment = {"AWS_ACCESS_KEY_ID": str(options.pop("key")), "AWS_SECRET_ACCESS_KEY": str(options.pop("secret"))}
    spec = messages.DatasetSpec(urls=[url], storage_options=options, environment=environment)
    # The daemon's own variables are wrong, so that whoever uses them is denied.
    own = {"AWS_ACCESS_KEY_ID": "wrong", "AWS_SECRET_ACCESS_KEY": "wrong"}
    for private in (True, False):
        daemon = daemons(private=private, environment=own, arguments=["--config", str(config)]).start()
        with daemon.connect() as client:
            fd = fdpass.sealed_memory_file("spec", frames.encode(spec))
            client.say(messages.OpenDataset(id=1), fd)
            os.close(fd)
            if private:
                reply, manifest_fd = client.answer()
                assert isinstance(reply, messages.DatasetReady)
                assert manifest_fd is not None
                os.close(manifest_fd)
            else:
                with pytest.raises(OriginDenied):
                    client.answer()
        assert daemon.stop() == 0
