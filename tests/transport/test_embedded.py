"""Starting a private daemon: one, whoever asks first, and a reason when there is none.

The daemon here is a stand-in that keeps the contract of the start and can be told to fail; the real one is under the
same client in ``tests/contract`` and ``tests/end_to_end``.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from cacheloader.config import TransportOptions
from cacheloader.errors import CacheUnusable, DaemonUnavailable, DeadlineExceeded
from cacheloader.transport import embedded
from cacheloader.transport.embedded import PrivateDaemon
from cacheloader.transport.link import Link
from cacheloader.transport.open import open_transport
from tests.support import node_daemon
from tests.support.descriptors import links_of
from tests.support.patience import patient_enough
from tests.support.waiting import wait_until
from tests.transport.test_session import SPEC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def cache(tmp_path) -> Iterator[Path]:
    """A cache directory; every daemon that was started for it is gone afterwards."""
    cache = tmp_path / "cache"
    yield cache
    for pid in pids(cache):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        wait_until(lambda pid=pid: not is_running(pid))


@pytest.fixture
def odd(monkeypatch) -> Callable[[str], None]:
    monkeypatch.setattr(embedded, "MODULE", "tests.transport.odd_daemon")
    monkeypatch.setenv("ODD_DAEMON", "")
    return lambda behaviour: monkeypatch.setenv("ODD_DAEMON", behaviour)


def starts(cache: Path) -> list[str]:
    return [line for file in cache.rglob("starts") for line in file.read_text().splitlines()]


def pids(cache: Path) -> list[int]:
    return [int(line.split()[0]) for line in starts(cache)]


def is_running(pid: int) -> bool:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return node_daemon.is_running(pid)


def endpoint(cache: Path, **options) -> PrivateDaemon:
    return PrivateDaemon(TransportOptions(cache_dir=cache, **options))


def connect(daemon: PrivateDaemon, timeout_s: float = 100.0) -> Link:
    return Link(daemon.connect(deadline=time.monotonic() + timeout_s, manifest=None), peer=daemon.name)


def soon() -> float:
    return time.monotonic() + 60


def test_daemon_is_started_with_what_was_asked_for_and_found_by_the_next(cache, odd):
    daemon = endpoint(cache, cache_size="1GiB", idle_timeout_s=7)
    first = connect(daemon)
    second = connect(endpoint(cache))
    assert first.hello(deadline=soon()).pid == second.hello(deadline=soon()).pid
    assert len(starts(cache)) == 1
    assert starts(cache)[0].split()[1:] == [str(2**30), "7.0"]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache / "daemon.log").stat().st_mode) == 0o600
    assert os.getsid(pids(cache)[0]) == pids(cache)[0]


def test_daemon_chooses_its_size_where_nobody_said_one(cache, odd):
    connect(endpoint(cache))
    assert starts(cache)[0].split()[1] == "None"


def test_daemon_inherits_no_descriptor_but_its_own(cache, odd, tmp_path):
    fd = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(fd, True)
    connect(endpoint(cache))
    links = links_of(pids(cache)[0])
    os.close(fd)
    assert any(link.startswith("socket:") for link in links)
    assert str(tmp_path / "secret") not in links


_RACER = """
import sys, time
from cacheloader.config import TransportOptions
from cacheloader.transport import embedded
from cacheloader.transport.link import Link
embedded.MODULE = sys.argv[2]
daemon = embedded.PrivateDaemon(TransportOptions(cache_dir=sys.argv[1]))
sys.stdin.readline()
link = Link(daemon.connect(deadline=time.monotonic() + 600, manifest=None), peer="d")
print(link.hello(deadline=time.monotonic() + 600).pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.timeout(600)
def test_sixteen_processes_at_once_start_exactly_one_daemon(cache, odd):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(cache), "tests.transport.odd_daemon"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(16)
    ]
    try:
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        seen = {int(racer.stdout.readline()) for racer in racers}
    finally:
        for racer in racers:
            racer.communicate("end\n", timeout=60)
    assert seen == set(pids(cache))
    assert len(seen) == 1


def test_killed_daemon_is_started_again(cache, odd):
    session = open_transport(TransportOptions(cache_dir=cache, hello_timeout_s=60))
    session.open_dataset(SPEC)
    lease = session.acquire(0)
    os.kill(pids(cache)[0], signal.SIGKILL)
    wait_until(lambda: not is_running(pids(cache)[0]))
    session.advance(3)
    assert session.acquire(1).read(0, 2) == b"BB"
    assert lease.read(0, 2) == b"AA"
    assert len(starts(cache)) == 2
    session.close()


def test_daemon_that_dies_at_its_start_is_an_error_with_the_end_of_its_log(cache, odd):
    odd("dies")
    started = time.monotonic()
    with pytest.raises(DaemonUnavailable, match=r"(?s)status 3.*daemon\.log.*the engine room is flooded"):
        connect(endpoint(cache), timeout_s=600)
    assert time.monotonic() - started < 60
    assert len(starts(cache)) == 1


def test_reason_that_the_daemon_gives_is_the_error(cache, odd):
    odd("refuses")
    with pytest.raises(CacheUnusable, match="the disk is read-only"):
        connect(endpoint(cache))
    assert len(starts(cache)) == 1


def test_daemon_that_says_something_else_is_an_error(cache, odd):
    odd("babbles")
    with pytest.raises(DaemonUnavailable, match="no JSON object"):
        connect(endpoint(cache))


def test_daemon_that_never_gets_ready_ends_in_an_error_that_names_its_log(cache, odd):
    odd("hangs")
    with pytest.raises(DeadlineExceeded, match=r"not ready yet.*daemon\.log"):
        connect(endpoint(cache), timeout_s=2)
    wait_until(lambda: len(starts(cache)) == 1)


def test_daemon_that_holds_the_directory_and_leaves_is_waited_for(cache, odd):
    cache.mkdir()
    holder = os.open(cache / "daemon.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)

    def leave_once_another_was_refused() -> None:
        wait_until(lambda: any(not node_daemon.is_running(pid) for pid in pids(cache)), timeout_s=60)
        os.close(holder)

    leaving = threading.Thread(target=leave_once_another_was_refused)
    leaving.start()
    connect(endpoint(cache)).hello(deadline=soon())
    leaving.join()
    assert len(starts(cache)) >= 2


def test_directory_that_another_daemon_keeps_is_an_error_that_names_the_holder(cache, odd):
    cache.mkdir()
    holder = os.open(cache / "daemon.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)

    def refusal(timeout_s: float) -> DaemonUnavailable | DeadlineExceeded:
        with pytest.raises((DaemonUnavailable, DeadlineExceeded)) as caught:
            connect(endpoint(cache), timeout_s=timeout_s)
        return caught.value

    error = patient_enough(refusal, is_early=lambda error: isinstance(error, DeadlineExceeded))
    assert isinstance(error, DaemonUnavailable)
    assert "pid 4711" in error.message
    os.close(holder)


def test_launch_that_somebody_else_never_finishes_runs_into_the_deadline(cache, odd):
    cache.mkdir()
    holder = os.open(cache / "launch.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(DeadlineExceeded, match=r"launch\.lock"):
        connect(endpoint(cache), timeout_s=0.3)
    os.close(holder)
    assert starts(cache) == []


@pytest.mark.parametrize("place", ["below a file", "/proc/none"])
def test_directory_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path, odd, place):
    (tmp_path / "file").write_bytes(b"")
    cache = tmp_path / "file" / "cache" if place == "below a file" else type(tmp_path)(place)
    with pytest.raises(CacheUnusable, match=r'cache_dir=.*daemon="none"'):
        connect(endpoint(cache))


def test_other_quota_than_the_one_asked_for_is_a_warning_once(cache, odd, caplog):
    connect(endpoint(cache, cache_size="1GiB"))
    other = endpoint(cache, cache_size="2GiB")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            other.check(connect(other).hello(deadline=soon()))
        same = endpoint(cache)
        same.check(connect(same).hello(deadline=soon()))
    assert len(caplog.records) == 1
    assert "2.0 GiB" in caplog.text
    assert "1.0 GiB" in caplog.text


def test_path_longer_than_the_kernel_takes_works_as_well(cache, odd):
    deep = cache / ("long" * 30)
    assert len(str(deep / "daemon.sock")) > 107
    link = connect(endpoint(deep))
    assert link.hello(deadline=soon()).pid == pids(deep)[0]
