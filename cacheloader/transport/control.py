"""Talking to a running daemon beside reading from it: its statistics, the end of a private one. Never starts one."""

from __future__ import annotations

import json
import os
import select
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cacheloader.config import TransportOptions
from cacheloader.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from cacheloader.protocol import messages
from cacheloader.transport.embedded import SOCKET_NAME
from cacheloader.transport.endpoint import connect, takes_no_connection
from cacheloader.transport.link import Link, PeerSilent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT_S = 10.0


def read_status(options: TransportOptions, *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The running daemon's statistics, as it reports them.

    Args:
        options: Which daemon; of a private one only ``cache_dir`` counts.
        timeout_s: Longest wait.

    Raises:
        DaemonUnavailable: None is running there.
    """
    deadline = time.monotonic() + timeout_s
    with _running(options, deadline) as (link, _):
        request = messages.GetStatus(id=link.next_id())
        link.send(request, deadline=deadline)
        answer = link.receive(request.id, deadline=deadline)
        if not isinstance(answer.reply, messages.Status):
            answer.close()
            raise ProtocolError(f"{link.peer} answered GetStatus with {type(answer.reply).__name__}")
        with os.fdopen(answer.take_fd(), "rb") as file:
            file.seek(0)
            status: dict[str, Any] = json.load(file)
            return status


def stop_daemon(cache_dir: Path, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Ask the private daemon of ``cache_dir`` to leave and wait until it is gone.

    Returns:
        Whether one was running.

    Raises:
        DeadlineExceeded: It is still there after ``timeout_s``, or does not answer at all.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with _running(TransportOptions(daemon="embedded", cache_dir=cache_dir), deadline) as (link, welcome):
            process = _process(welcome.pid)
            request = messages.Stop(id=link.next_id())
            link.send(request, deadline=deadline)
            link.receive(request.id, deadline=deadline).close()
            name = f"{link.peer} (pid {welcome.pid})"
            try:
                _wait_for_end(process if process is not None else link.fileno(), deadline, name)
            finally:
                if process is not None:
                    os.close(process)
    except PeerSilent as error:
        raise DeadlineExceeded(error.message) from error
    except DaemonUnavailable:
        return False
    return True


def _process(pid: int) -> int | None:
    """A descriptor that ends with the process; ``None`` if it is not visible here (another container)."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def connect_running(options: TransportOptions, deadline: float) -> Link:
    """A connection to the daemon that runs, before its ``hello``.

    Raises:
        DaemonUnavailable: None is running there.
        PeerSilent: One is, and takes no connection.
    """
    path = options.socket_path or options.directory / SOCKET_NAME
    try:
        sock = connect(path, deadline=deadline)
    except TimeoutError as error:
        raise takes_no_connection(f"the daemon at {path}") from error
    except OSError as error:
        raise DaemonUnavailable(f"no daemon listens at {path} ({error.strerror or error})") from error
    return Link(sock, peer=f"the daemon at {path}")


@contextmanager
def _running(options: TransportOptions, deadline: float) -> Iterator[tuple[Link, messages.Welcome]]:
    link = connect_running(options, deadline)
    try:
        yield link, link.hello(deadline=deadline)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{link.peer} did not answer within its deadline") from error
    finally:
        link.close()


def _wait_for_end(end: int, deadline: float, name: str) -> None:
    """Wait until ``end`` is readable: a process that has ended, or a connection that was closed."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise DeadlineExceeded(f"{name} was asked to stop and still runs; end it with kill")
