"""One client's session: its requests, checked, become calls of the runtime, and what comes back becomes replies."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from typing import TYPE_CHECKING, assert_never

from cacheloader import fdpass
from cacheloader.errors import CacheloaderError, ConfigError, DaemonError, ProtocolError
from cacheloader.protocol import messages
from cacheloader.protocol.frames import MAX_SPEC_BYTES, failed, sendable
from cacheloader_daemon.accesses import map_accesses

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from cacheloader_daemon.datasets import Datasets
    from cacheloader_daemon.lease import ShardLease
    from cacheloader_daemon.runtime import Runtime
    from cacheloader_daemon.server.connection import Connection
    from cacheloader_daemon.shards import Dataset
    from cacheloader_daemon.tenants import Visitor
    from cacheloader_daemon.watching import WatchedRank, Watching

log = logging.getLogger(__name__)

MAX_NEWS_CHARACTERS = 1000

LARGEST_CLOCK = 2**62
"""Rows over all epochs; above this, sums of clocks would no longer fit an int64."""


class Session:
    """The requests of one connection, in the order they came.

    Args:
        connection: Where replies go.
        runtime: What does the work.
        datasets: Where data sets come from.
        max_requests: Unanswered requests at once; one more is refused.
        environment_counts: Whether the client's own credential variables are used (a private daemon) or dropped.
        stop: Makes the daemon leave; ``None`` if clients may not.
        status: The daemon's statistics, encoded.
        watching: Ranks that asked to be watched.
        visitor: Who is at the other end; ``None`` for the daemon's own user.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        runtime: Runtime,
        datasets: Datasets,
        max_requests: int,
        environment_counts: bool,
        stop: Callable[[], None] | None,
        status: Callable[[], bytes],
        watching: Watching,
        visitor: Visitor | None = None,
    ) -> None:
        self._connection = connection
        self._runtime = runtime
        self._datasets = datasets
        self._max_requests = max_requests
        self._environment_counts = environment_counts
        self._stop = stop
        self._status = status
        self._visitor = visitor
        self._watching = watching
        self._watched: WatchedRank | None = None
        self._open_requests: set[int] = set()
        self._acquiring: dict[int, int] = {}  # request to shard
        self._loop = asyncio.get_running_loop()
        self._beat: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = False
        self._dataset: Dataset | None = None
        self._session = 0

    def requested(self, request: messages.Request, fd: int | None) -> None:
        """Take a request and the ownership of its descriptor.

        Raises:
            ProtocolError: The client broke the rules.
        """
        takes_fd = isinstance(request, messages.OpenDataset | messages.FollowPlan | messages.WatchRun)
        if takes_fd != (fd is not None):
            _close(fd)
            raise ProtocolError(f"{type(request).__name__} came {'without its' if takes_fd else 'with a'} descriptor")
        match request:
            case messages.Hello():
                raise ProtocolError("Hello came twice on one connection")
            case messages.Advance():
                self._advance(request)
            case messages.Release():
                self._release(request)
            case messages.WatchRun():
                assert fd is not None, "checked above"
                if self._watched is not None:
                    _close(fd)
                    raise ProtocolError("WatchRun came twice on one connection")
                self._watched = self._watching.watch(request, fd, pid=self._connection.peer.pid)
            case messages.Beat() | messages.EndRun():
                if self._watched is None:
                    raise ProtocolError(f"{type(request).__name__} came before WatchRun")
                if isinstance(request, messages.Beat):
                    self._watched.beat(request)
                else:
                    self._watched.end()
            case messages.Report():
                self._runtime.account.reported(request.fetch_seconds, request.samples)
                self._runtime.account.missed(request.fallbacks, request.away_seconds)
            case _:
                try:
                    admitted = self._admit(request.id)
                except ProtocolError:
                    _close(fd)
                    raise
                if admitted:
                    self._answer(request, fd)
                else:
                    _close(fd)

    def disconnected(self) -> None:
        """The client is gone: its requests, plan and leases end."""
        for task in list(self._tasks):
            task.cancel()
        if self._beat is not None:
            self._beat.cancel()
        if self._watched is not None:
            self._watched.close()
            self._watched = None
        if self._dataset is not None:
            self._runtime.close_session(self._session)
            self._dataset = None

    def _admit(self, request_id: int) -> bool:
        if not 0 < request_id < 2**63 or request_id in self._open_requests:
            raise ProtocolError(f"request id {request_id} is in use or no positive number")
        if len(self._open_requests) >= self._max_requests:
            error = DaemonError(
                f"{self._max_requests} requests of this connection wait for an answer already (max_requests); "
                "wait for replies before asking for more"
            )
            self._connection.send(failed(request_id, error))
            return False
        self._open_requests.add(request_id)
        return True

    def _answer(
        self,
        request: messages.OpenDataset | messages.FollowPlan | messages.Acquire | messages.GetStatus | messages.Stop,
        fd: int | None,
    ) -> None:
        try:
            match request:
                case messages.OpenDataset():
                    assert fd is not None
                    self._open(request, fd)
                case messages.FollowPlan():
                    assert fd is not None
                    self._follow(request, fd)
                    self._finish(request.id, messages.Accepted(id=request.id))
                case messages.Acquire():
                    self._acquire(request)
                case messages.GetStatus():
                    status_fd = fdpass.sealed_memory_file("status", self._status())
                    self._finish(request.id, messages.Status(id=request.id), status_fd)
                case messages.Stop():
                    if self._stop is None:
                        raise ConfigError("this daemon is shared and does not obey Stop; its supervisor can stop it")
                    self._finish(request.id, messages.Accepted(id=request.id))
                    self._stop()
                case _:
                    assert_never(request)
        except CacheloaderError as error:
            self._fail(request.id, error)

    def _finish(self, request_id: int, reply: messages.Reply, fd: int | None = None) -> None:
        self._open_requests.discard(request_id)
        self._acquiring.pop(request_id, None)
        self._connection.send(reply, fd)

    def _fail(self, request_id: int, error: CacheloaderError) -> None:
        self._finish(request_id, failed(request_id, error))

    def _opened(self, what: str) -> Dataset:
        if self._dataset is None:
            raise ProtocolError(f"{what} came before a data set was opened")
        return self._dataset

    def _open(self, request: messages.OpenDataset, fd: int) -> None:
        try:
            if self._opening or self._dataset is not None:
                raise ProtocolError("one connection reads one data set; open another connection for another data set")
            block = _map_sealed(fd)
        finally:
            # At once and not in the task, which a client that leaves may cancel before it begins.
            os.close(fd)
        self._opening = True
        self._spawn(self._resolve(request, block))

    async def _resolve(self, request: messages.OpenDataset, block: mmap.mmap) -> None:
        def progress(stage: str, done: int, total: int) -> None:
            # Nobody needs an old number: where the client does not read, progress is not queued.
            if self._connection.num_outgoing == 0:
                self._connection.send(messages.Progress(id=request.id, stage=stage, done=done, total=total))

        try:
            spec = await asyncio.to_thread(lambda: block[:])
            dataset = await self._datasets.open(
                spec,
                digest=request.digest,
                environment_counts=self._environment_counts,
                progress=progress,
                visitor=self._visitor,
            )
            manifest_fd = await self._datasets.manifest_fd(dataset)
        except CacheloaderError as error:
            self._fail(request.id, error)
            return
        except Exception as error:
            # The outer edge of a task: the client has to hear of it.
            log.exception("opening a data set met a defect")
            self._fail(request.id, DaemonError(f"the daemon met a defect ({error!r}); its log has the traceback"))
            return
        finally:
            self._opening = False
        self._session = self._runtime.open_session(dataset, visitor=self._visitor)
        self._dataset = dataset
        ready = messages.DatasetReady(id=request.id, digest=dataset.manifest.digest)
        self._finish(request.id, ready, manifest_fd)

    def _follow(self, request: messages.FollowPlan, fd: int) -> None:
        try:
            self._opened("FollowPlan")
            if not 0 <= request.clock <= LARGEST_CLOCK:
                raise ProtocolError(f"clock {request.clock} is not between 0 and {LARGEST_CLOCK}")
            accesses = map_accesses(fd, request.num_accesses)
        finally:
            os.close(fd)
        self._runtime.follow(self._session, accesses, clock=request.clock)

    def _advance(self, request: messages.Advance) -> None:
        self._opened("Advance")
        if not 0 <= request.clock <= LARGEST_CLOCK:
            raise ProtocolError(f"clock {request.clock} is not between 0 and {LARGEST_CLOCK}")
        self._runtime.advance(self._session, request.clock)

    def _acquire(self, request: messages.Acquire) -> None:
        dataset = self._opened("Acquire")
        if not 0 <= request.shard < len(dataset.manifest):
            raise ProtocolError(f"shard {request.shard} of a data set of {len(dataset.manifest)} shards")

        def deliver(outcome: ShardLease | CacheloaderError) -> None:
            if isinstance(outcome, CacheloaderError):
                self._fail(request.id, outcome)
                return
            leased = messages.Leased(id=request.id, size_bytes=outcome.size_bytes, source=outcome.source)
            index = messages.LeasedIndex(id=request.id, size_bytes=outcome.index_bytes)
            self._connection.send(leased, outcome.data_fd)
            self._finish(request.id, index, outcome.index_fd)

        self._acquiring[request.id] = request.shard
        self._runtime.demand(self._session, request.shard, deliver)
        if self._beat is None and self._acquiring:
            self._beat = self._loop.call_later(messages.HEARTBEAT_S, self._give_signs_of_life)

    def _give_signs_of_life(self) -> None:
        """Say how what waits stands; a client that hears nothing takes the daemon for hung."""
        self._beat = None
        if not self._acquiring or self._connection.is_closed:
            return
        if self._connection.num_outgoing == 0:
            for request, shard in list(self._acquiring.items()):
                news = self._runtime.news(self._session, shard)
                stage = sendable(news.stage, MAX_NEWS_CHARACTERS)
                self._connection.send(messages.Progress(id=request, stage=stage, done=news.done, total=news.total))
        self._beat = self._loop.call_later(messages.HEARTBEAT_S, self._give_signs_of_life)

    def _release(self, request: messages.Release) -> None:
        self._opened("Release")
        self._runtime.release(self._session, request.shard)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._runtime.spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _map_sealed(fd: int) -> mmap.mmap:
    """A sealed memory file, which its writer can no longer change or shrink under us; ``fd`` may be closed."""
    # Sealed first: a size that is looked at before that may be another one by now.
    is_sealed = fdpass.is_sealed(fd)
    size_bytes = os.fstat(fd).st_size
    if not is_sealed or not 0 < size_bytes <= MAX_SPEC_BYTES:
        raise ProtocolError(f"a data set's description has to be a sealed memory file of 1 to {MAX_SPEC_BYTES} bytes")
    return mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
