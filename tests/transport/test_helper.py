"""One helper process for all processes of a user, and what happens where it cannot be shared."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cacheloader.config import TransportOptions
from cacheloader.protocol.messages import DatasetSpec
from cacheloader.transport import helper
from cacheloader.transport.open import open_transport
from cacheloader.transport.runtime_folder import runtime_folder
from tests.contract.transports import NUM_SHARDS, SAMPLES_PER_SHARD, tar_of, write_data
from tests.support.helper_processes import helpers
from tests.support.private_web import PrivateWeb
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheloader.transport.daemon import DaemonTransport

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
STRANGER_UID = 65501


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_data(tmp_path / "data")
    return tmp_path / "data" / "good"


@pytest.fixture
def web() -> Iterator[PrivateWeb]:
    counts = json.dumps({f"{shard}.tar": SAMPLES_PER_SHARD for shard in range(NUM_SHARDS)})
    files = {f"/{shard}.tar": tar_of(shard) for shard in range(NUM_SHARDS)}
    with PrivateWeb(files={**files, "/shards.json": counts.encode()}) as web:
        yield web


def opened(cache: Path, urls: list[str], **options: float) -> DaemonTransport:
    patient = {"hello_timeout_s": 60, **options}
    session = open_transport(TransportOptions(daemon="none", cache_dir=cache, timeout_s=60, **patient))
    session.open_dataset(DatasetSpec(urls=urls))
    return session


def read(session: DaemonTransport, shard: int) -> None:
    lease = session.acquire(shard)
    assert lease.read(0, lease.size_bytes) == tar_of(shard)
    lease.release()


_READER = """
import sys
from pathlib import Path
from cacheloader.transport import helper
from tests.transport.test_helper import NUM_SHARDS, opened, read
helper.IDLE_S = 0.5
cache, *urls = sys.argv[1:]
sys.stdin.readline()
session = opened(Path(cache), urls)
for shard in range(NUM_SHARDS):
    read(session, shard)
print("read", flush=True)
sys.stdin.readline()
session.close()
"""


def test_processes_that_start_at_once_share_one_helper_that_fetches_each_shard_once(
    cache: Path, web: PrivateWeb, tmp_path: Path
) -> None:
    urls = [f"{web.url}/{shard}.tar" for shard in range(NUM_SHARDS)]
    with opened_processes(4, cache, urls) as readers:
        for reader in readers:
            reader.stdin.write("go\n")
            reader.stdin.flush()
        assert [reader.stdout.readline() for reader in readers] == ["read\n"] * 4
        assert len(helpers(cache)) == 1
        (path,) = (tmp_path / "cacheloader").glob("*.sock")
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    fetched = sorted(path for method, path, _ in web.asked if method == "GET" and path.endswith(".tar"))
    assert fetched == [f"/{shard}.tar" for shard in range(NUM_SHARDS)]
    wait_until(lambda: not helpers(cache))
    assert not path.exists()


@contextmanager
def opened_processes(number: int, cache: Path, urls: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that wait for a line, read everything, say so, and wait for another line."""
    command = [sys.executable, "-c", _READER, str(cache), *urls]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(number)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            try:
                process.communicate("end\n", timeout=60)
            finally:
                process.kill()


def test_a_killed_helper_is_replaced_by_one_for_all_sessions(cache: Path, data: Path) -> None:
    sessions = [opened(cache, [f"{data}/"]) for _ in range(3)]
    for session in sessions:
        read(session, 0)
    (first,) = helpers(cache)
    os.kill(first, signal.SIGKILL)
    for session in sessions:
        read(session, 1)
    assert len(helpers(cache)) == 1
    assert helpers(cache) != [first]
    for session in sessions:
        session.close()


@pytest.mark.timeout(300)
def test_a_shared_helper_that_hangs_is_left_for_one_of_this_process(
    cache: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(cache, [f"{data}/"])  # a helper that loads its engines is silent for a moment, and does not hang
    read(first, 0)
    session = opened(cache, [f"{data}/"], hello_timeout_s=5)
    read(session, 0)
    (shared,) = helpers(cache)
    os.kill(shared, signal.SIGSTOP)
    try:
        read(session, 1)
        assert len(helpers(cache)) == 2
        another = opened(cache, [f"{data}/"], hello_timeout_s=5)
        read(another, 2)
        assert f"kill -CONT {shared}" in caplog.text
        assert "memory for itself alone, since the shared one hangs" in caplog.text
        for one in (another, session, first):
            one.close()
    finally:
        os.kill(shared, signal.SIGKILL)
    wait_until(lambda: not helpers(cache))


def test_another_memory_bound_or_cache_directory_is_another_helper(cache: Path, data: Path) -> None:
    sessions = [opened(cache, [f"{data}/"]), opened(cache, [f"{data}/"], direct_memory=1 << 20)]
    assert len(helpers(cache)) == 2
    for session in sessions:
        session.close()


def test_without_a_folder_to_meet_in_each_process_has_a_helper_and_says_so(
    cache: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    sessions = [opened(cache, [f"{data}/"]) for _ in range(2)]
    for session in sessions:
        read(session, 0)
    assert len(helpers(cache)) == 2
    assert "up to 256.0 MiB of memory for itself alone, since there is no folder to share one in" in caplog.text
    assert "set XDG_RUNTIME_DIR" in caplog.text
    for session in sessions:
        session.close()
    assert not helpers(cache), "one of this process's own ends with its session"


def test_a_helper_that_cannot_be_started_for_all_is_started_for_one_and_the_reason_is_told(
    cache: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cacheloader").mkdir(mode=0o700)
    kind = helper._kind(TransportOptions(daemon="none", cache_dir=cache))
    (tmp_path / "cacheloader" / f"helper-{kind}.log").mkdir()
    session = opened(cache, [f"{data}/"])
    read(session, 0)
    assert "since a shared one cannot be had: Is a directory" in caplog.text
    session.close()


@needs_root
def test_a_folder_that_another_user_has_made_first_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for folder in (tmp_path / "cacheloader", tmp_path / "tmp" / f"cacheloader-{os.geteuid()}"):
        folder.mkdir(parents=True)
        os.chown(folder, STRANGER_UID, STRANGER_UID)
    with pytest.raises(OSError, match=f"belongs to user {STRANGER_UID}.*belongs to user {STRANGER_UID}"):
        runtime_folder()


def test_a_link_in_the_place_of_the_folder_is_not_followed_and_one_open_to_others_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cacheloader").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"cacheloader-{os.geteuid()}"
    own.mkdir(mode=0o755)
    assert runtime_folder() == own
    assert own.stat().st_mode & 0o777 == 0o700


@needs_root
def test_a_socket_of_another_user_is_not_spoken_to(
    cache: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cacheloader"
    folder.mkdir(mode=0o700)
    path = folder / f"helper-{helper._kind(TransportOptions(daemon='none', cache_dir=cache))}.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held = os.open(folder, os.O_PATH)
    listener.bind(f"/proc/self/fd/{held}/{path.name}")  # the path itself may be longer than a socket's may be
    os.close(held)
    # The kernel notes who called listen.
    os.seteuid(STRANGER_UID)
    try:
        listener.listen(8)
    finally:
        os.seteuid(0)
    session = opened(cache, [f"{data}/"])
    read(session, 0)
    assert f"a process of user {STRANGER_UID} listens at {path}" in caplog.text
    session.close()
    listener.setblocking(False)
    heard, _ = listener.accept()
    heard.setblocking(False)
    assert heard.recv(100) == b"", "nothing was said, the environment's credentials least of all"
    heard.close()
    listener.close()


@needs_root
def test_a_helper_turns_processes_of_other_users_away(cache: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder and the socket were opened to them by mistake."""
    place = Path(tempfile.mkdtemp(prefix="cacheloader-open-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    session = opened(cache, [f"{data}/"])
    (path,) = place.glob("*/*.sock")
    for opened_up in (place, path.parent, path):
        opened_up.chmod(0o777)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(30)
        os.seteuid(STRANGER_UID)
        try:
            client.connect(str(path))
        finally:
            os.seteuid(0)
        assert client.recv(100) == b""
    read(session, 0)
    session.close()
    wait_until(lambda: not helpers(cache))
    shutil.rmtree(place)


def test_a_session_that_comes_while_the_helper_leaves_is_served(
    cache: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper leaves at once, and another session comes again and again."""
    monkeypatch.setattr(helper, "IDLE_S", 0.0)
    for number in range(4):
        session = opened(cache, [f"{data}/"])
        read(session, 0)
        session.close()
        time.sleep(0.001 * number)
    wait_until(lambda: not helpers(cache))
