"""Starting a helper or a daemon from inside a training process: by exec, never by a bare fork.

A bare fork would copy locks that other threads hold, CUDA contexts, and every socket of the job.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from cacheloader import interpreter
from cacheloader.errors import DaemonUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LAST_WAIT_S = 5.0
_PAUSE_S = 0.005
_LOG_TAIL_BYTES = 1500


class Child:
    """A process that this one has started and has to collect when it ends.

    Args:
        pid: Its number.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._parent = os.getpid()
        self._status: int | None = None

    def exit_status(self, *, timeout_s: float = 0.0) -> int | None:
        """How it ended (negative: by that signal), ``None`` while it runs after ``timeout_s``, or if that is unknown.

        A forked copy of this process is not the parent and never knows.
        """
        if self._status is None and self._parent == os.getpid():
            deadline = time.monotonic() + timeout_s
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                while not pid and time.monotonic() < deadline:
                    time.sleep(_PAUSE_S)
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return None  # collected by somebody else's waitpid(-1)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def end(self, *, timeout_s: float) -> None:
        """Collect it, by force if it has not left by itself after ``timeout_s``."""
        if self._parent == os.getpid() and self.exit_status(timeout_s=timeout_s) is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            self.exit_status(timeout_s=_LAST_WAIT_S)


def start(
    module: str,
    arguments: Sequence[str],
    *,
    pass_fds: Sequence[int],
    output: int | None = None,
    own_session: bool = False,
) -> Child:
    """Run ``python -m module arguments…`` in a new process.

    Args:
        module: Dotted name; its package is found where this process found it, wherever that was.
        arguments: Command line.
        pass_fds: Descriptors that it inherits under their own numbers; all others are closed in it.
        output: Descriptor for its standard output and error; ``None`` leaves it this process's own.
        own_session: Whether it must outlive this process, its terminal and its process group.

    Raises:
        DaemonUnavailable: There is no interpreter to run, or it cannot be started.
    """
    if not sys.executable:
        raise DaemonUnavailable(
            f"{module} cannot be started: this interpreter does not know its own program (sys.executable is empty); "
            "run a shared daemon and pass daemon="
        )
    try:
        process = subprocess.Popen(  # noqa: S603
            interpreter.command(module, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            close_fds=True,
            pass_fds=tuple(pass_fds),
            env=os.environ | {"PYTHONPATH": interpreter.search_path(module)},
            cwd="/" if own_session else None,
            start_new_session=own_session,
        )
    except OSError as error:
        raise DaemonUnavailable(f"{module} cannot be started with {sys.executable}: {error}") from error
    # Collected by ``Child``, which unlike Popen neither warns about a child that goes on nor confuses a forked copy.
    process.returncode = 0
    return Child(process.pid)


def log_tail(log: Path) -> str:
    """The end of what a process has logged, for an error about it."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "(nothing)"
    except OSError as error:
        return f"(it cannot be read: {error.strerror})"


def wait_readable(fd: int, *, deadline: float) -> bool:
    """Whether ``fd`` has data or is at its end before the deadline (on the clock of ``time.monotonic``)."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
