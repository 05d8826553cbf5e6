"""A real daemon watches a rank that cannot speak for itself any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cacheloader.errors import ProtocolError
from cacheloader.goodput import events
from cacheloader.goodput.folder import EventFolder
from cacheloader.protocol import messages
from tests.support.node_daemon import NodeDaemon
from tests.support.seaweedfs import free_ports
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]

RANK = """
import sys, time
from pathlib import Path
from cacheloader.config import TransportOptions
from cacheloader.transport.reporting import FetchReporter

options = TransportOptions(daemon="unix://" + sys.argv[1])
watch = FetchReporter(options).watch(Path(sys.argv[2]), run="r", attempt="a", rank=3, world=4)
watch.PATIENCE_S = 10.0
watch.beat(7, dur_s=0.5, exposed_s=0.25, tokens=100, kept_tokens=0, committed=-1)
if sys.argv[3] == "ends":
    watch.beat(8, dur_s=0.5, exposed_s=0.0, tokens=100, kept_tokens=200, committed=8)
    watch.end()
else:
    print("beat", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[NodeDaemon]:
    daemon = NodeDaemon(tmp_path / "cache").start()
    yield daemon
    daemon.stop()


def start(daemon: NodeDaemon, path: Path, what: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", RANK, str(daemon.socket), str(path), what],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon"},
    )


def seen(folder: Path) -> list[Any]:
    return EventFolder(folder).read() if list(folder.glob("events-*.jsonl")) else []


def test_a_killed_rank_leaves_the_time_of_its_death_and_a_hung_one_heartbeats(
    daemon: NodeDaemon, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "events-a-n-daemon-r00003.jsonl"
    path.parent.mkdir()
    with start(daemon, path, "waits") as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"beat\n"
        rank.send_signal(signal.SIGSTOP)
        wait_until(lambda: any(event.state == "T" for event in seen(path.parent)), timeout_s=40)
        rank.kill()
        rank.wait(10)
        wait_until(lambda: any(isinstance(event, events.Fail) for event in seen(path.parent)), timeout_s=40)
    found = seen(path.parent)
    beat = next(event for event in found if isinstance(event, events.Heartbeat))
    assert (beat.of_rank, beat.step, beat.world, beat.rank) == (3, 7, 4, -1)
    (fail,) = [event for event in found if isinstance(event, events.Fail)]
    assert (fail.kind, fail.of_rank, fail.first_seen_by) == ("exit", 3, "daemon")
    assert found[0].wall_ns < fail.died_wall_ns <= fail.wall_ns


def test_a_rank_that_ends_by_itself_is_not_missed_and_its_numbers_are_in_the_metrics(
    daemon: NodeDaemon, tmp_path: Path
) -> None:
    daemon.stop()
    port = next(free_ports())
    daemon.arguments = ["--metrics-port", str(port)]
    daemon.start()
    path = tmp_path / "events-a-n-daemon-r00003.jsonl"
    with start(daemon, path, "ends") as rank:
        assert rank.wait(60) == 0
    import urllib.request

    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    wait_until(lambda: "training_watched_ranks 0" in metrics(), timeout_s=20)
    text = metrics()
    for line in (
        "training_steps_total 2",
        "cacheloader_exposed_stall_seconds_total 0.25",
        'training_tokens_total{state="issued"} 200',
        'training_tokens_total{state="kept"} 200',
        "training_last_commit_step 8",
        "training_vanished_ranks_total 0",
    ):
        assert line in text
    assert path.read_bytes() == b""


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
def test_a_file_that_is_not_open_for_appending_is_refused(daemon: NodeDaemon, tmp_path: Path, flags: int) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"precious")
    fd = os.open(target, flags)
    with daemon.connect() as client:
        client.say(messages.WatchRun(run="r", attempt="a", rank=0, world=1), fd)
        reply, _ = client.hear()
        assert isinstance(reply, messages.Failed)
        assert reply.kind == ProtocolError.__name__
    os.close(fd)
    assert target.read_bytes() == b"precious"


def test_a_daemon_that_leaves_blames_nobody(daemon: NodeDaemon, tmp_path: Path) -> None:
    path = tmp_path / "events-a-n-daemon-r00003.jsonl"
    with start(daemon, path, "waits") as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"beat\n"
        wait_until(path.exists)
        daemon.stop()
        rank.kill()
    assert path.read_bytes() == b""
