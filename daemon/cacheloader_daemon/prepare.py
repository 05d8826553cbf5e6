"""Indexes of shards, made in processes of their own: so that it costs the node once, and the event loop nothing."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from cacheloader import fdpass, interpreter
from cacheloader.errors import DaemonError, DatasetError, DeadlineExceeded, ProtocolError, from_wire
from cacheloader_daemon.indexer import LOWEST_PRIORITY, PrepareFailed, PrepareShard, ShardPrepared

log = logging.getLogger(__name__)

BASE_TIMEOUT_S = 30.0
"""Covers the start of a worker on a busy node."""

SLOWEST_BYTES_PER_S = 10 * 10**6
"""A guess at what an index takes at the lowest priority on a saturated node."""

STOP_TIMEOUT_S = 5.0

BACKLOG_S = 0.25
"""How long a shard waits for a process that runs before another one is started: one keeps up with several GB/s where
samples are large, and its start costs as much as the indexes of twenty shards."""

_INDEXER = "cacheloader_daemon.indexer"

_answers = msgspec.json.Decoder(ShardPrepared | PrepareFailed)


class DiskReadFailed(Exception):
    """The worker could not read the shard back from the disk that it was just written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
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


class _WorkerLost(Exception):
    """The process ended before it answered."""


class _Worker:
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
        return self._process.pid if self._process is not None else 0

    def start(self) -> socket.socket:
        with self._guard:
            if self._is_closed:
                raise _WorkerLost
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
            raise _WorkerLost from error
        if not received.data:
            self.stop()
            raise _WorkerLost
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


class Preparers:
    """A few worker processes; a task waits for a free one.

    The first has the daemon's own priority, since a reader may wait for what it does. The others work off what piles
    up, and only when nobody else wants a core.

    Args:
        num_processes: How many at most.
    """

    def __init__(self, num_processes: int) -> None:
        self._workers = [_Worker(0 if number == 0 else LOWEST_PRIORITY) for number in range(num_processes)]
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="prepare")
        self._free: asyncio.PriorityQueue[int] = asyncio.PriorityQueue()
        self._free.put_nowait(0)
        self._unused = list(range(1, num_processes))
        self._num_lost = 0
        self._is_closed = False

    @property
    def num_lost(self) -> int:
        """Workers that ended before they answered."""
        return self._num_lost

    @property
    def pids(self) -> list[int]:
        """Processes that run now."""
        return [worker.pid for worker in self._workers if worker.pid]

    async def warm(self) -> None:
        """Start the first process now, so that the first shard does not wait for its imports."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._workers[0].start)
        except (_WorkerLost, DaemonError) as error:
            log.info("no index worker was started ahead: %r", error)

    async def prepare(self, fd: int, *, format_name: str, uri: str, size_bytes: int) -> Prepared:
        """Index of the shard in ``fd``.

        A worker that is lost (killed, out of memory) costs one more try.

        Raises:
            DatasetError: The shard is not what it should be, or it ended two workers.
            DeadlineExceeded: It took too long.
            DiskReadFailed: Its bytes cannot be read back.
        """
        task = PrepareShard(format=format_name, uri=uri, size_bytes=size_bytes)
        timeout_s = BASE_TIMEOUT_S + size_bytes / SLOWEST_BYTES_PER_S
        number = await self._free_worker()
        worker = self._workers[number]
        try:
            try:
                return await self._exchange(worker, task, fd, timeout_s)
            except _WorkerLost:
                self._num_lost += 1
                log.warning("an indexing process was lost at %s; trying once more", uri)
            try:
                return await self._exchange(worker, task, fd, timeout_s)
            except _WorkerLost:
                self._num_lost += 1
                raise DatasetError(
                    f"{uri} ended the indexing process twice (killed, or out of memory); the shard of {size_bytes} "
                    "bytes may be damaged, or the node short of memory",
                    uri=uri,
                ) from None
        finally:
            self._free.put_nowait(number)

    async def _free_worker(self) -> int:
        if self._unused and self._free.empty():
            try:
                async with asyncio.timeout(BACKLOG_S):
                    return await self._free.get()
            except TimeoutError:
                if self._unused:
                    return self._unused.pop(0)
        return await self._free.get()  # no deadline: each of those before has one

    async def _exchange(self, worker: _Worker, task: PrepareShard, fd: int, timeout_s: float) -> Prepared:
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, worker.exchange, task, fd, timeout_s)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The caller closes ``fd`` next, so the thread has to be done with it first.
            worker.kill()
            await asyncio.wait([work])
            if not work.cancelled() and work.exception() is None:
                work.result().close()
            raise

    async def aclose(self) -> None:
        """End all processes; calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, worker.close) for worker in self._workers))
        self._threads.shutdown(wait=True)
