"""The real daemon and the real helper process die, hang and come back under a session that reads on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cacheloader.config import TransportOptions
from cacheloader.errors import ConfigError, CorruptShard, DaemonUnavailable, OriginNotFound
from cacheloader.protocol.messages import DatasetSpec
from cacheloader.transport import direct as direct_endpoint
from cacheloader.transport import embedded, helper
from cacheloader.transport.base import AccessPlan
from cacheloader.transport.control import read_status
from cacheloader.transport.daemon import DaemonTransport
from cacheloader.transport.embedded import PrivateDaemon
from cacheloader.transport.open import open_transport
from tests.contract.transports import NUM_SHARDS, Backend, running, shared_daemon, tar_of, write_data
from tests.support.descriptors import links_of
from tests.support.helper_processes import command, helpers
from tests.support.nginx import NginxServer
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


PATIENCE_S = 60.0


@pytest.fixture
def private(tmp_path, monkeypatch) -> Iterator[Backend]:
    monkeypatch.setattr(PrivateDaemon, "patience_s", PATIENCE_S)  # one that is only slow is waited for
    with running("embedded", tmp_path) as backend:
        yield patient(backend)
        backend.close()


@pytest.fixture
def nginx(tmp_path) -> Iterator[NginxServer]:
    server = NginxServer(tmp_path / "nginx")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def direct(tmp_path) -> Iterator[Backend]:
    with running("direct", tmp_path) as backend:
        yield patient(backend)
        backend.close()


def patient(backend: Backend) -> Backend:
    """Whoever is there has all the time to answer, however busy the machine is."""
    assert backend.options is not None
    backend.options = replace(backend.options, timeout_s=600.0, hello_timeout_s=PATIENCE_S)
    return backend


def opened(backend: Backend) -> DaemonTransport:
    session = backend.session()
    assert isinstance(session, DaemonTransport)
    session.open_dataset(backend.spec())
    shards = np.arange(NUM_SHARDS, dtype=np.int32)
    session.follow(AccessPlan(first_clock=shards * 10, stop_clock=shards * 10 + 10, shard=shards, clock=0))
    return session


def read(session: DaemonTransport, shard: int) -> str:
    lease = session.acquire(shard)
    assert lease.read(0, lease.size_bytes) == tar_of(shard)
    lease.release()
    return lease.source


def daemon_pid(backend: Backend) -> int:
    assert backend.options is not None
    return int((backend.options.directory / "daemon.lock").read_text().split()[0])


def test_killed_private_daemon_is_started_again_and_finds_its_cache_warm(private, tmp_path):
    session = opened(private)
    held = session.acquire(0)
    for shard in range(NUM_SHARDS):
        read(session, shard)
    os.kill(daemon_pid(private), signal.SIGKILL)
    session.advance(5)
    assert [read(session, shard) for shard in range(NUM_SHARDS)] == ["nvme"] * NUM_SHARDS
    assert held.read(0, held.size_bytes) == tar_of(0)
    route = session.statistics().route
    assert (route.reconnects, route.fallbacks) == (1, 0)
    assert helpers(tmp_path) == []


def test_private_daemon_killed_with_a_request_in_flight_delivers_all_the_same(private):
    session = opened(private)
    pid = daemon_pid(private)
    os.kill(pid, signal.SIGSTOP)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -KILL {pid}"])
    assert read(session, 1) in {"nvme", "origin"}
    killer.wait()
    assert session.statistics().route.reconnects == 1


def test_private_daemon_leaves_when_nobody_is_connected_and_the_next_session_starts_another(tmp_path, monkeypatch):
    monkeypatch.setattr(PrivateDaemon, "patience_s", PATIENCE_S)  # it may leave before its first client has come
    write_data(tmp_path / "data")
    options = TransportOptions(cache_dir=tmp_path / "cache", cache_size="64MiB", idle_timeout_s=1.0)
    backend = Backend(name="embedded", folder=tmp_path / "data", options=options)
    pids = []
    for _ in range(2):
        session = opened(backend)
        read(session, 0)
        pids.append(daemon_pid(backend))
        session.close()
        wait_until(lambda: not (tmp_path / "cache" / "daemon.sock").exists(), timeout_s=PATIENCE_S)
    assert pids[0] != pids[1]


_RACER = """
import sys
from tests.contract.transports import Backend, tar_of
from cacheloader.config import TransportOptions
from pathlib import Path
backend = Backend(name="embedded", folder=Path(sys.argv[1]), options=TransportOptions(cache_dir=sys.argv[2]))
sys.stdin.readline()
session = backend.session()
session.open_dataset(backend.spec())
lease = session.acquire(int(sys.argv[3]))
assert lease.read(0, lease.size_bytes) == tar_of(int(sys.argv[3]))
print("ok", flush=True)
sys.stdin.readline()
session.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixteen_processes_at_once_share_one_real_daemon(private):
    assert private.options is not None
    cache = private.options.directory
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(private.folder), str(cache), str(number % NUM_SHARDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(16)
    ]
    try:
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        assert [racer.stdout.readline() for racer in racers] == ["ok\n"] * 16
        daemons = [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and f"--cache-dir {cache} " in command(int(entry.name))
        ]
    finally:
        for racer in racers:
            racer.communicate("end\n", timeout=PATIENCE_S)
    assert daemons == [daemon_pid(private)]


def test_cache_that_breaks_in_the_middle_of_a_run_is_read_around(private, tmp_path, monkeypatch):
    session = opened(private)
    read(session, 0)
    # The daemon is gone and no other can be started: the package is broken, or the node out of processes.
    monkeypatch.setattr(embedded, "MODULE", "cacheloader_daemon.no_such_module")
    os.kill(daemon_pid(private), signal.SIGKILL)
    assert [read(session, shard) for shard in range(NUM_SHARDS)].count("nvme") == 0
    assert session.statistics().route.is_away
    assert len(helpers(tmp_path)) == 1
    session.close()
    wait_until(lambda: helpers(tmp_path) == [])


def test_lost_shared_daemon_is_replaced_by_a_helper_until_it_is_back(tmp_path):
    write_data(tmp_path / "data")
    socket = tmp_path / "shared.sock"
    options = TransportOptions(
        daemon=f"unix://{socket}", fallback_after_s=0.2, timeout_s=PATIENCE_S, hello_timeout_s=PATIENCE_S
    )
    backend = Backend(name="shared", folder=tmp_path / "data", options=options)
    with shared_daemon(tmp_path, cache=tmp_path / "cache", path=socket) as process:
        wait_until(lambda: answers(options))
        session = opened(backend)
        held = session.acquire(0)
        read(session, 1)
        process.kill()
        process.wait()
        assert [read(session, shard) for shard in (1, 2, 3, 4)].count("nvme") == 0
        assert session.statistics().route.is_away
        assert len(helpers(tmp_path)) == 1
    socket.unlink()
    with shared_daemon(tmp_path, cache=tmp_path / "cache", path=socket):

        def is_home() -> bool:
            read(session, 2)
            return not session.statistics().route.is_away

        wait_until(is_home, timeout_s=PATIENCE_S)
        wait_until(lambda: helpers(tmp_path) == [])
        assert read(session, 1) == "nvme"
        assert held.read(0, held.size_bytes) == tar_of(0)
        route = session.statistics().route
        assert (route.fallbacks, route.returns) == (1, 1)
        session.close()


def answers(options: TransportOptions) -> bool:
    try:
        read_status(options)
    except DaemonUnavailable:
        return False
    return True


def test_killed_helper_is_replaced_and_does_not_resolve_the_data_set_again(direct, tmp_path):
    session = opened(direct)
    held = session.acquire(0)
    (first,) = helpers(tmp_path)
    (direct.folder / "good" / "new.tar").write_bytes(tar_of(0))  # would change the manifest if it were resolved again
    os.kill(first, signal.SIGKILL)
    for shard in range(NUM_SHARDS):
        read(session, shard)
    assert held.read(0, held.size_bytes) == tar_of(0)
    assert helpers(tmp_path) != [first]
    assert len(helpers(tmp_path)) == 1


def test_another_session_of_a_known_data_set_does_not_resolve_it_again(direct):
    first = direct.session()
    manifest = first.open_dataset(direct.spec())
    (direct.folder / "good" / "new.tar").write_bytes(tar_of(0))
    again = direct.session().open_dataset(direct.spec(), digest=manifest.digest)
    assert len(again) == NUM_SHARDS


def test_helper_fetches_ahead_along_the_plan(direct, tmp_path):
    session = opened(direct)
    (helper,) = helpers(tmp_path)
    wait_until(lambda: sum("memfd:cacheloader-index" in file for file in links_of(helper)) == 2)
    assert read(session, 0) == "memory"


def test_helper_leaves_with_its_client_however_that_ends(direct, tmp_path):
    script = tmp_path / "client.py"
    script.write_text(
        "import os, signal, sys\n"
        "from tests.contract.transports import Backend\n"
        "from tests.support.helper_processes import helpers\n"
        "from tests.transport.test_real_peers import opened\n"
        "from cacheloader.config import TransportOptions\n"
        "from cacheloader.transport import helper\n"
        "from pathlib import Path\n"
        "helper.IDLE_S = 0.5\n"
        "options = TransportOptions(daemon='none', cache_dir=sys.argv[2])\n"
        "session = opened(Backend(name='direct', folder=Path(sys.argv[1]), options=options))\n"
        "print(*helpers(sys.argv[2]), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, script, direct.folder, tmp_path / "c"],
        check=False, stdout=subprocess.PIPE, text=True, timeout=100, env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not command(int(done.stdout)))


def test_interrupt_at_the_terminal_does_not_end_the_helper(direct, tmp_path):
    session = opened(direct)
    (helper,) = helpers(tmp_path)
    os.kill(helper, signal.SIGINT)
    read(session, 3)
    assert helpers(tmp_path) == [helper]


def test_shard_that_disappears_is_an_error_of_the_origin_with_and_without_a_daemon(tmp_path):
    for name in ("embedded", "direct"):
        with running(name, tmp_path / name) as backend:
            session = opened(backend)
            read(session, 0)
            few = backend.session()
            few.open_dataset(backend.spec("few/"))
            (backend.folder / "few" / "4.tar").unlink()
            if name == "direct":
                with pytest.raises(OriginNotFound, match=r"4\.tar"):
                    few.acquire(1)
            backend.close()


def test_helper_that_cannot_start_is_an_error_within_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_endpoint, "MODULE", "cacheloader.transport.no_such_module")
    session = open_transport(
        TransportOptions(daemon="none", cache_dir=tmp_path, timeout_s=600, hello_timeout_s=600, launch_timeout_s=600)
    )
    started = time.monotonic()
    with pytest.raises(DaemonUnavailable, match="its own helper process"):
        session.open_dataset(DatasetSpec(urls=[str(tmp_path)]))
    assert time.monotonic() - started < 60
    session.close()


@pytest.mark.timeout(300)
def test_helper_reads_a_web_server_through_the_engine_and_leaves_cleanly(tmp_path, nginx):
    """The engine's threads abort a process that ends too soon after its last request; the helper must not."""
    write_data(nginx.root)
    options = TransportOptions(daemon="none", cache_dir=tmp_path / "c", timeout_s=60, hello_timeout_s=PATIENCE_S)
    urls = [f"{nginx.url}/good/{shard}.tar" for shard in range(NUM_SHARDS)]
    for _ in range(5):
        session = open_transport(options)
        session.open_dataset(DatasetSpec(urls=urls))
        for shard in range(NUM_SHARDS):
            read(session, shard)
        (pid,) = helpers(tmp_path)
        (child,) = (child for child in helper._started if child.pid == pid)
        session.close()  # which collects it, if it is that quick
        assert child.exit_status(timeout_s=PATIENCE_S) == 0


def test_wrong_data_is_refused_within_seconds(direct):
    started = time.monotonic()
    with pytest.raises(CorruptShard):
        direct.session().open_dataset(direct.spec("cut/"))
    assert time.monotonic() - started < 60


def test_name_that_is_no_text_is_refused_with_an_answer_and_not_with_silence(direct, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / os.fsdecode(b"bad\xff.tar.gz")).write_bytes(b"x")
    started = time.monotonic()
    with pytest.raises(ConfigError, match="bad"):
        direct.session().open_dataset(DatasetSpec(urls=[f"{folder}/"]))
    assert time.monotonic() - started < 60
