"""The daemon's life, seen from outside: starting, refusing to start, leaving, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cacheloader.errors import ConfigError, DaemonUnavailable
from cacheloader.protocol import messages
from tests.support.descriptors import links_of
from tests.support.node_daemon import REPOSITORY, NodeDaemon, is_running
from tests.support.raw_client import RawClient
from tests.support.seaweedfs import free_ports
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.shard_sets import ShardSet

    Daemons = Callable[..., NodeDaemon]


def test_a_daemon_says_when_it_is_ready_and_who_it_is(daemons: Daemons) -> None:
    daemon = daemons().start()
    with daemon.connect() as client:
        assert isinstance(client.welcome, messages.Welcome)
        assert client.welcome.pid == daemon.pid
        assert client.welcome.quota_bytes == 200 * 2**20
    assert (daemon.directory / "daemon.lock").read_text().strip() == str(daemon.pid)
    assert daemon.directory.stat().st_mode & 0o777 == 0o700
    assert daemon.socket.stat().st_mode & 0o777 == 0o600


def test_a_stopped_daemon_leaves_no_process_no_socket_and_no_open_index(daemons: Daemons, shards: ShardSet) -> None:
    daemon = daemons().start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
    workers = daemon.children
    assert workers
    assert daemon.stop() == 0
    assert not any(is_running(pid) for pid in workers)
    assert not daemon.socket.exists()
    assert not daemon.partial_files
    assert "Traceback" not in daemon.log


def test_a_private_daemon_obeys_stop_and_tells_the_others(daemons: Daemons) -> None:
    daemon = daemons().start()
    with daemon.connect() as other, daemon.connect() as client:
        assert isinstance(client.stop(), messages.Accepted)
        with pytest.raises(DaemonUnavailable, match="the daemon is leaving"):
            other.answer()
        assert daemon.exit_code() == 0
    assert not daemon.socket.exists()


def test_a_shared_daemon_refuses_stop(daemons: Daemons, tmp_path: Path) -> None:
    daemon = daemons(private=False).start()
    with daemon.connect() as client:
        with pytest.raises(ConfigError, match="this daemon is shared and does not obey Stop"):
            client.stop()
        assert client.status()


def visited_in_time(daemons: Daemons) -> tuple[NodeDaemon, RawClient, float]:
    """A daemon that leaves soon, somebody who came before it did, and its time-out: longer on a slow machine."""
    timeout_s = 0.3
    while True:
        daemon = daemons(arguments=["--idle-timeout", f"{timeout_s}"]).start()
        try:
            return daemon, daemon.connect(), timeout_s
        except (OSError, EOFError, DaemonUnavailable):
            assert daemon.exit_code() == 0
        timeout_s *= 4


def test_a_private_daemon_leaves_when_nobody_was_connected_for_a_while(daemons: Daemons) -> None:
    daemon, client, timeout_s = visited_in_time(daemons)
    with client, pytest.raises(subprocess.TimeoutExpired):
        daemon.exit_code(timeout_s=2 * timeout_s)
    assert daemon.exit_code() == 0
    assert not daemon.socket.exists()
    assert "nobody was connected" in daemon.log


def test_a_second_daemon_on_a_directory_names_the_first(daemons: Daemons) -> None:
    first, second = daemons().start(), daemons()
    line = second.try_start()
    assert line["error"] == "DaemonUnavailable"
    assert f"process {first.pid}" in line["message"]
    assert second.exit_code() == 1
    first.status()  # and it was not disturbed


def test_a_socket_that_a_killed_daemon_left_is_replaced(daemons: Daemons) -> None:
    daemon = daemons().start()
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    daemon.status()


def test_a_directory_at_the_place_of_the_socket_is_refused(daemons: Daemons) -> None:
    daemon = daemons()
    daemon.socket.mkdir(parents=True)
    line = daemon.try_start()
    assert line["error"] == "CacheUnusable"
    assert "a directory is at" in line["message"]
    assert daemon.exit_code() == 1


def test_a_long_path_is_served_through_its_directory(tmp_path: Path, daemons: Daemons) -> None:
    daemon = daemons(directory=tmp_path / ("long" * 30))
    daemon.start()
    fd = os.open(daemon.directory, os.O_PATH)
    try:
        with RawClient(Path(f"/proc/self/fd/{fd}/daemon.sock")) as client:
            client.status()
    finally:
        os.close(fd)
    assert daemon.stop() == 0
    assert not daemon.socket.exists()


def test_a_quota_below_its_own_index_is_refused_with_the_arithmetic(daemons: Daemons) -> None:
    daemon = daemons(cache_size="100KiB")
    line = daemon.try_start()
    assert line["error"] == "QuotaTooSmall"
    assert re.search(r"cache_size=102400 \(100\.0 KiB\) leaves no room .* take \d+ bytes", line["message"])
    assert daemon.exit_code() == 1


@pytest.mark.timeout(300)
def test_without_a_size_the_cache_takes_three_quarters_of_what_is_above_the_floor(
    daemons: Daemons, tmp_path: Path
) -> None:
    def above_floor_bytes() -> float:
        disk = os.statvfs(tmp_path)
        return (disk.f_bavail - 0.01 * disk.f_blocks) * disk.f_frsize

    looks: list[tuple[float, float, float]] = []
    # Other programs write and delete between our looks at the disk and the daemon's; once they do not is enough.
    while len(looks) < 12:
        before = above_floor_bytes()
        daemon = daemons(cache_size="").start()
        quota_bytes, after = daemon.plan()["quota_bytes"], above_floor_bytes()
        daemon.stop()
        looks.append((before, quota_bytes / 0.75, after))
        if 0.99 * min(before, after) <= quota_bytes / 0.75 <= 1.01 * max(before, after):
            return
    pytest.fail(f"{looks}")


def test_a_wrong_command_line_is_told_through_the_ready_descriptor(daemons: Daemons) -> None:
    daemon = daemons(cache_size="plenty")
    line = daemon.try_start()
    assert line == {"error": "ConfigError", "message": line["message"]}
    assert "cache_size='plenty' is no size" in line["message"]
    assert daemon.exit_code() == 1


def test_a_shared_daemon_reads_its_file_and_serves_metrics(tmp_path: Path, daemons: Daemons) -> None:
    config = tmp_path / "cacheloaderd.toml"
    daemon = daemons(private=False, cache_size="", arguments=["--config", str(config)])
    for port in free_ports():
        config.write_text(
            f'cache_dir = "{tmp_path}/elsewhere"\ncache_size = "50MiB"\nmetrics_port = {port}\nlog_level = "WARNING"\n'
        )
        line = daemon.try_start()
        if line.get("ready"):
            break
        assert "metrics_port" in line["message"], "another program took the port since we looked"
    with daemon.connect() as client:
        client.say(messages.Report(fetch_seconds=[0.02, 0.4], samples=64))
        client.status()  # the report was taken before this is answered
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
            text = response.read().decode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as response:
            assert response.status == 200
    assert f"cacheloader_store_limit_bytes {50 * 2**20}" in text
    assert 'cacheloader_fetch_seconds_bucket{le="0.025"} 1' in text
    assert "cacheloader_fetch_seconds_count 2" in text
    assert "cacheloader_samples_total 64" in text
    assert 'cacheloader_degraded{reason="disk"} 0' in text
    assert "cacheloader_connections 1" in text
    # Every line is a comment or a sample with a number.
    for line in text.splitlines():
        assert line.startswith("#") or re.fullmatch(r'\w+(\{\w+="[^"]*"\})? (\d+(\.\d+)?(e-?\d+)?|\+Inf)', line), line


def test_a_private_daemon_opens_no_port(daemons: Daemons) -> None:
    daemon = daemons().start()
    tcp = [Path(f"/proc/{daemon.pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    links = links_of(daemon.pid)
    assert any(link.startswith("socket:") for link in links)
    listening = [line.split()[9] for table in tcp for line in table.splitlines()[1:] if line.split()[3] == "0A"]
    assert not any(f"socket:[{inode}]" in links for inode in listening)


def test_a_daemon_started_over_a_socket_from_systemd_says_ready_and_keeps_the_file(tmp_path: Path) -> None:
    import socket

    path, notify = tmp_path / "s", tmp_path / "notify"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor,
    ):
        listening.bind(str(path))
        listening.listen()
        supervisor.bind(str(notify))
        supervisor.settimeout(60)
        # As systemd does it: the socket at descriptor 3, and LISTEN_PID set between fork and exec.
        program = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3);"
            "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1');"
            "os.execv(sys.executable, [sys.executable, '-P', '-m', 'cacheloader_daemon', *sys.argv[2:]])"
        )
        arguments = [str(listening.fileno()), "--cache-dir", str(tmp_path / "c"), "--cache-size", "50MiB"]
        daemon = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            pass_fds=[listening.fileno()],
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon",
                "NOTIFY_SOCKET": str(notify),
                # The next beat is ten seconds away: nobody reads them here, and a socket holds a few only.
                "WATCHDOG_USEC": "20000000",
            },
        )
        try:
            assert supervisor.recv(200).startswith(b"READY=1\n")
            assert supervisor.recv(200) == b"WATCHDOG=1"
            with RawClient(path) as client:
                assert client.status()
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(60) == 0
        finally:
            daemon.kill()
            daemon.wait()
        assert path.exists()
        told = []
        supervisor.settimeout(0.0)
        while not told or told[-1] != b"STOPPING=1":
            told.append(supervisor.recv(200))


def test_the_daemon_never_imports_torch(daemons: Daemons, shards: ShardSet) -> None:
    daemon = daemons().start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        for pid in [daemon.pid, *daemon.children]:
            assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    modules = ", ".join(f"cacheloader_daemon.{name}" for name in ("app", "counting", "indexer"))
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_descriptors_processes_and_memory_files_do_not_grow_with_clients(daemons: Daemons, shards: ShardSet) -> None:
    daemon = daemons().start()

    def visit() -> None:
        with daemon.connect() as client:
            manifest = client.open_dataset([shards.folder])
            client.follow(range(len(manifest)))
            for shard in range(len(manifest)):
                lease = client.acquire(shard)
                lease.close()
            client.status()

    visit()
    with daemon.connect() as client:
        client.status()
    wait_until(lambda: daemon.plan()["sessions"] == 0)
    before, children = daemon.num_fds, daemon.children
    for _ in range(10):
        visit()
    wait_until(lambda: daemon.plan()["sessions"] == 0)
    wait_until(lambda: daemon.num_fds <= before)
    assert daemon.children == children


@pytest.mark.parametrize("moment", ["idle", "at work"])
def test_sigterm_ends_it_cleanly_at_any_moment(daemons: Daemons, shards: ShardSet, moment: str) -> None:
    for _ in range(3):
        daemon = daemons().start()
        client = daemon.connect()
        if moment == "at work":
            client.open_dataset([shards.folder])
            client.follow(range(8), rows=10)
            client.say(messages.Acquire(id=99, shard=5))
        assert daemon.stop() == 0
        client.sock.close()
        assert "Traceback" not in daemon.log
        assert not daemon.partial_files


def test_an_index_that_cannot_be_closed_does_not_hold_the_daemon(tmp_path: Path) -> None:
    """1. The daemon is told to leave. 2. Closing its index hangs in the disk. 3. It ends all the same."""
    program = textwrap.dedent(
        """
        import sys, threading
        from cacheloader_daemon import app, cli
        from cacheloader_daemon.store import Store
        app.DRAIN_TIMEOUT_S = 0.5
        Store.close = lambda self: threading.Event().wait()
        sys.exit(cli.main(sys.argv[1:]))
        """
    )
    news, ready = os.pipe()
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                program,
                "--private",
                "--cache-dir",
                tmp_path / "cache",
                "--ready-fd",
                str(ready),
            ],
            stderr=log,
            pass_fds=[ready],
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon"},
        )
    os.close(ready)
    try:
        assert b"ready" in os.read(news, 1000)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 1
    finally:
        os.close(news)
        daemon.kill()
        daemon.wait(60)
    assert "did not drain" in (tmp_path / "log").read_text()
