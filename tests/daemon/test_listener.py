"""The listening socket: where it may lie, what it replaces, whom it lets in."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cacheloader_daemon.server.listener import Admission, Listener, bind, inherited_from_systemd

from cacheloader import fdpass
from cacheloader.errors import CacheUnusable, DaemonUnavailable
from cacheloader.protocol import frames, messages
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


def connect(path: Path | str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(60)
    sock.connect(str(path))
    return sock


def test_only_its_owner_may_open_the_socket(tmp_path: Path) -> None:
    with bind(tmp_path / "s", mode=0o600):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    bind(tmp_path / "s", mode=0o600).close()
    with bind(tmp_path / "s", mode=0o600), connect(tmp_path / "s"):
        pass


def test_a_socket_that_somebody_listens_on_is_left_alone(tmp_path: Path) -> None:
    with bind(tmp_path / "s", mode=0o600):
        with pytest.raises(DaemonUnavailable, match="another daemon listens"):
            bind(tmp_path / "s", mode=0o600)
        with connect(tmp_path / "s"):
            pass


@pytest.mark.parametrize("kind", ["a directory", "a file that is no socket"])
def test_what_is_no_socket_is_refused_and_kept(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    path.mkdir() if kind == "a directory" else path.write_text("precious")
    with pytest.raises(CacheUnusable, match=f"{kind} is at {path}"):
        bind(path, mode=0o600)
    assert path.exists()


def test_a_directory_that_is_missing_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(CacheUnusable, match=r"no socket can be made at .*/missing/s: No such file"):
        bind(tmp_path / "missing" / "s", mode=0o600)


def test_a_path_longer_than_the_kernel_allows_works_through_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    with bind(directory / "s", mode=0o600):
        fd = os.open(directory, os.O_PATH)
        with connect(f"/proc/self/fd/{fd}/s"):
            pass
        os.close(fd)
    with bind(directory / "s", mode=0o600):  # the stale one was found by the same way
        pass


class Door:
    """A listener, and the sockets that it let in."""

    def __init__(self, path: Path, admission: Admission, *, max_connections: int = 10) -> None:
        self.let_in: list[socket.socket] = []
        self.listener = Listener(
            bind(path, mode=0o666),
            loop=asyncio.get_running_loop(),
            admission=admission,
            max_connections=max_connections,
            num_connections=lambda: len(self.let_in),
            accepted=self.let_in.append,
            path=path,
        )

    def close(self) -> None:
        self.listener.close()
        for sock in self.let_in:
            sock.close()


async def test_connections_above_the_limit_are_told_so_even_if_they_spoke_first(tmp_path: Path) -> None:
    door = Door(tmp_path / "s", Admission(uids=frozenset({os.getuid()})), max_connections=1)
    with connect(tmp_path / "s"), connect(tmp_path / "s") as second:
        fdpass.send(second, frames.encode(messages.Hello(oldest=1, newest=1)))
        await until(lambda: bool(door.let_in))
        reply = frames.decode_reply(fdpass.receive(second).data)
        assert isinstance(reply, messages.Failed)
        assert (reply.id, reply.kind) == (0, "DaemonUnavailable")
        assert "max_connections=1" in reply.message
        assert fdpass.receive(second).data == b""
    door.close()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users reach; pytest keeps its own closed, also to those who have opened them."""
    with tempfile.TemporaryDirectory(prefix="cacheloader-listener-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(
    ("admission", "expected"),
    [
        (Admission(uids=frozenset({0})), "user 65534 may not use this daemon"),
        (Admission(uids=frozenset({0, 65534})), "let in"),
        (Admission(uids=frozenset({0}), gids=frozenset({65533})), "let in"),
        (Admission(uids=frozenset({0}), gids=frozenset({65531})), "let in"),
        (Admission(uids=frozenset({0}), gids=frozenset({65530})), "user 65534 may not use this daemon"),
    ],
    ids=["stranger", "by user", "by main group", "by another of its groups", "by a group of others"],
)
async def test_the_kernel_says_who_the_peer_is(open_folder: Path, admission: Admission, expected: str) -> None:
    door = Door(open_folder / "s", admission)
    program = textwrap.dedent(
        """
        import os, socket, sys
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.setgroups([65532, 65531]); os.setgid(65533); os.setuid(65534)
        sock.settimeout(60)
        sock.connect(sys.argv[1])
        print(sock.recv(65536))
        """
    )
    client = subprocess.Popen(
        [sys.executable, "-c", program, str(open_folder / "s")], stdout=subprocess.PIPE, text=True
    )
    if expected == "let in":
        await until(lambda: bool(door.let_in))
        assert fdpass.peer_credentials(door.let_in[0]).uid == 65534
        door.let_in[0].send(b"let in")
    stdout, _ = await asyncio.to_thread(client.communicate)
    assert expected in stdout
    door.close()


async def test_the_socket_file_goes_with_its_listener(tmp_path: Path) -> None:
    door = Door(tmp_path / "s", Admission(uids=frozenset()))
    door.close()
    door.close()
    assert not (tmp_path / "s").exists()


async def test_a_socket_file_that_a_successor_made_is_left_alone(tmp_path: Path) -> None:
    door = Door(tmp_path / "s", Admission(uids=frozenset()))
    (tmp_path / "s").rename(tmp_path / "old")
    with bind(tmp_path / "s", mode=0o600):
        door.close()
        assert (tmp_path / "s").exists()


def test_a_socket_from_systemd_is_used_and_its_variables_are_taken() -> None:
    program = textwrap.dedent(
        """
        import os, socket, sys
        os.dup2(int(sys.argv[1]), 3)  # where systemd would have put it
        from cacheloader_daemon.server.listener import inherited_from_systemd
        environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "HOME": "/"}
        sock = inherited_from_systemd(environment, pid=os.getpid())
        print(sock.getsockname(), sock.get_inheritable(), sock.gettimeout(), environment)
        """
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind("\0cacheloader-test-" + str(os.getpid()))
        sock.listen()
        ran = subprocess.run(
            [sys.executable, "-c", program, str(sock.fileno())],
            pass_fds=[sock.fileno()],
            capture_output=True,
            text=True,
            check=True,
        )
    assert f"cacheloader-test-{os.getpid()}" in ran.stdout
    assert ran.stdout.rstrip().endswith("False 0.0 {'HOME': '/'}")


def test_a_socket_meant_for_another_process_is_not_touched() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1"}
    assert inherited_from_systemd(environment, pid=os.getpid()) is None
    assert environment == {}
