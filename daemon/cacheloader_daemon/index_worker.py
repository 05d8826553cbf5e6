"""One process that makes indexes, and the talk with it.

It is started before the daemon has imported what it needs itself, and nothing here may import that: the two starts then
run side by side, and the first shard finds its indexer ready.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import subprocess
import threading

import msgspec

from cacheloader import fdpass, interpreter
from cacheloader.errors import DaemonError, DeadlineExceeded, ProtocolError, from_wire
from cacheloader_daemon.indexer import PrepareFailed, PrepareShard, ShardPrepared

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0

_INDEXER = "cacheloader_daemon.indexer"

_answers = msgspec.json.Decoder(ShardPrepared | PrepareFailed)


class DiskReadFailed(Exception):
    """The worker could not read the shard back from the disk that it was just written to."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a shard once it was worked on.

    Attributes:
        index_fd: Sealed memory file with the sample index, owned by the receiver.
        index_bytes: Length of the index.
    """

    index_fd: int
    index_bytes: int

    def read_index(self) -> bytes:
        """The index."""
        if self.index_bytes == 0:
            return b""
        with mmap.mmap(self.index_fd, self.index_bytes, prot=mmap.PROT_READ) as mapped:
            return mapped[:]

    def close(self) -> None:
        """Close the memory file."""
        os.close(self.index_fd)


class WorkerLost(Exception):
    """The process ended before it answered."""


class IndexWorker:
    """One process, started at its first task and again after it was lost. Used by one thread at a time.

    Args:
        nice: Added to its niceness.
    """

    def __init__(self, nice: int) -> None:
        self._nice = nice
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._guard = threading.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int:
        """The process, 0 if none runs."""
        process = self._process  # another thread may forget it meanwhile
        return process.pid if process is not None else 0

    def start(self) -> socket.socket:
        """Start the process if none runs, without a wait for its imports; the socket to it.

        Raises:
            DaemonError: It cannot be started.
            WorkerLost: It was closed for good.
        """
        with self._guard:
            if self._is_closed:
                raise WorkerLost
            if self._sock is not None:
                return self._sock
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = interpreter.command(_INDEXER, str(theirs.fileno()), str(self._nice))
                environment = {**os.environ, "PYTHONPATH": interpreter.search_path(_INDEXER)}
                try:
                    self._process = subprocess.Popen(  # noqa: S603
                        command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
                    )
                except OSError as error:
                    ours.close()
                    raise DaemonError(
                        f"a process that indexes shards cannot be started ({error.strerror}); the node is short of "
                        "memory or processes"
                    ) from error
            self._sock = ours
            return ours

    def exchange(self, task: PrepareShard, fd: int, timeout_s: float) -> Prepared:
        """One task and its answer; blocks for at most ``timeout_s``."""
        sock = self.start()
        try:
            sock.settimeout(timeout_s)
            fdpass.send(sock, msgspec.json.encode(task), fd)
            received = fdpass.receive(sock)
        except TimeoutError:
            self.stop()
            raise DeadlineExceeded(
                f"{task.uri} ({task.size_bytes} bytes) was not indexed within {timeout_s:.0f} s; the node has no "
                "processor time left, or the shard is not what its format expects",
                uri=task.uri,
            ) from None
        except OSError as error:
            self.stop()
            raise WorkerLost from error
        if not received.data:
            self.stop()
            raise WorkerLost
        answer = _answers.decode(received.data)
        if isinstance(answer, PrepareFailed):
            if answer.kind == "OSError":
                raise DiskReadFailed(answer.message)
            raise from_wire(answer.kind, answer.message, answer.uri)
        if received.fd is None:
            raise ProtocolError("an index came without its descriptor")
        return Prepared(index_fd=received.fd, index_bytes=answer.index_bytes)

    def kill(self) -> None:
        """End the process; a thread that waits for its answer is woken. Safe from any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """End the process and forget it."""
        with self._guard:
            process, sock = self._process, self._sock
            self._process = self._sock = None
        if sock is not None:
            sock.close()
        if process is not None:
            process.kill()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # It sits in a system call of a broken disk; what the caller has to report matters more.
                log.warning("index worker %d did not end within %g s of being killed", process.pid, STOP_TIMEOUT_S)

    def close(self) -> None:
        """End the process for good."""
        with self._guard:
            self._is_closed = True
        self.stop()
