"""A real daemon watches a rank that cannot speak for itself any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cacheloader.errors import ProtocolError
from cacheloader.goodput import events
from cacheloader.goodput.folder import EventFolder
from cacheloader.protocol import messages
from tests.support.descriptors import links_of
from tests.support.node_daemon import NodeDaemon
from tests.support.parent_death import die_with_parent
from tests.support.seaweedfs import free_ports
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(300)

RANK = """
import sys
from pathlib import Path
from cacheloader.config import TransportOptions
from cacheloader.transport.reporting import FetchReporter

options = TransportOptions(daemon="unix://" + sys.argv[1])
watch = FetchReporter(options).watch(Path(sys.argv[2]), run="r", attempt="a", rank=3, world=4)
watch.PATIENCE_S = 100.0
watch.beat(7, dur_s=0.5, exposed_s=0.25, tokens=100, kept_tokens=0, committed=-1)
if sys.argv[3] == "ends":
    watch.beat(8, dur_s=0.5, exposed_s=0.0, tokens=100, kept_tokens=200, committed=8)
    watch.end()
else:
    print("beat", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[NodeDaemon]:
    daemon = NodeDaemon(tmp_path / "cache").start()
    yield daemon
    daemon.stop()


@contextmanager
def started(daemon: NodeDaemon, path: Path, what: str) -> Iterator[subprocess.Popen[bytes]]:
    """A rank that is gone afterwards, whatever state it was in."""
    with subprocess.Popen(
        die_with_parent([sys.executable, "-P", "-c", RANK, str(daemon.socket), str(path), what]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon"},
    ) as rank:
        try:
            yield rank
        finally:
            rank.kill()


def seen(folder: Path) -> list[Any]:
    return EventFolder(folder).read() if list(folder.glob("events-*.jsonl")) else []


def test_a_killed_rank_leaves_the_time_of_its_death_and_a_hung_one_heartbeats(
    daemon: NodeDaemon, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "events-a-n-daemon-r00003.jsonl"
    path.parent.mkdir()
    with started(daemon, path, "waits") as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"beat\n"
        rank.send_signal(signal.SIGSTOP)
        wait_until(lambda: any(event.state == "T" for event in seen(path.parent)), timeout_s=100)
        rank.kill()
        rank.wait(60)
        wait_until(lambda: any(isinstance(event, events.Fail) for event in seen(path.parent)), timeout_s=100)
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
    path = tmp_path / "run" / "events-a-n-daemon-r00003.jsonl"
    path.parent.mkdir()
    with started(daemon, path, "ends") as rank:
        assert rank.wait(100) == 0

    def missing() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return [line for line in EXPECTED if line not in text]

    # The rank waits for no answer: what it has said last may not be read yet. With the file closed all is decided.
    wait_until(lambda: not missing(), timeout_s=100)
    wait_until(lambda: str(path) not in links_of(daemon.pid), timeout_s=100)
    assert missing() == []
    assert accusations(path) == []


EXPECTED = (
    "training_watched_ranks 0",
    "training_steps_total 2",
    "cacheloader_exposed_stall_seconds_total 0.25",
    'training_tokens_total{state="issued"} 200',
    'training_tokens_total{state="kept"} 200',
    "training_last_commit_step 8",
    "training_vanished_ranks_total 0",
)


def accusations(path: Path) -> list[Any]:
    """What the daemon wrote about a rank, but for the heartbeats of one that was slow."""
    assert path.exists()
    return [event for event in seen(path.parent) if not isinstance(event, events.Heartbeat)]


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
    path = tmp_path / "run" / "events-a-n-daemon-r00003.jsonl"
    path.parent.mkdir()
    with started(daemon, path, "waits") as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"beat\n"
        wait_until(path.exists)
        daemon.stop()
    assert accusations(path) == []
