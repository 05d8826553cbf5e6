"""What a helper process and one of its clients say to each other. All of it runs on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from importlib import import_module
from typing import TYPE_CHECKING

import cacheloader
from cacheloader import fdpass
from cacheloader.errors import CacheloaderError, ConfigError, DaemonError, ProtocolError
from cacheloader.protocol import frames, messages

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    from cacheloader.transport.direct_datasets import DirectDatasets
    from cacheloader.transport.direct_reader import DirectReader

_MESSAGES_PER_TURN = 32
_PROGRESS_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


class Conversation:
    """One client's requests and their answers.

    Args:
        sock: The connection, owned from here on.
        datasets: What all clients of this process share.
        memory_bytes: What may be held ready beside the shards that are leased, for the greeting.
    """

    def __init__(self, sock: socket.socket, *, datasets: Callable[[], DirectDatasets], memory_bytes: int) -> None:
        sock.settimeout(0.0)
        self._sock = sock
        self._datasets = datasets
        self._memory_bytes = memory_bytes
        self._loop = asyncio.get_running_loop()
        self._reader: DirectReader | None = None
        self._is_opening = False
        self._outgoing: deque[tuple[bytes, int | None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, messages.Progress] = {}  # request to the latest news of it
        self._beat: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Return when the client is gone, and everything that it had is given back."""
        self._loop.add_reader(self._sock.fileno(), self._read)
        await self._ended.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._beat is not None:
            self._beat.cancel()
        if self._reader is not None:
            self._datasets().close(self._reader)
        while self._outgoing:
            _close(self._outgoing.popleft()[1])
        self._sock.close()

    def _read(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            try:
                received = fdpass.receive(self._sock)
            except BlockingIOError:
                return
            except (OSError, ProtocolError):
                self._end()
                return
            if not received.data:
                self._end()
                return
            try:
                self._take(frames.decode_request(received.data), content_of(received.fd))
            except CacheloaderError as error:
                self._fail(0, error)

    def _take(self, request: messages.Request, content: bytes) -> None:
        match request:
            case messages.Hello():
                self._say(
                    messages.Welcome(
                        version=frames.agree(request),
                        daemon=f"cacheloader {cacheloader.__version__} without a cache",
                        pid=os.getpid(),
                        quota_bytes=self._memory_bytes,
                    )
                )
            case messages.OpenDataset():
                self._work(request.id, self._open(request, content))
            case messages.FollowPlan():
                try:
                    self._opened().follow(content, num_accesses=request.num_accesses, clock=request.clock)
                    self._say(messages.Accepted(id=request.id))
                except CacheloaderError as error:
                    self._fail(request.id, error)
            case messages.Advance():
                self._opened().advance(request.clock)
            case messages.Acquire():
                self._work(request.id, self._lend(request))
            case messages.Release():
                self._opened().release(request.shard)
            case messages.Report() | messages.WatchRun() | messages.Beat() | messages.EndRun():
                pass
            case messages.GetStatus() | messages.Stop():
                self._fail(
                    request.id, ConfigError(f"{type(request).__name__} is for a daemon; this session reads without one")
                )

    async def _open(self, request: messages.OpenDataset, content: bytes) -> None:
        last_news_s = 0.0
        last_stage = ""

        def progress(stage: str, done: int, total: int) -> None:
            nonlocal last_news_s, last_stage
            now = self._loop.time()
            if stage != last_stage or done == total or now - last_news_s >= _PROGRESS_PAUSE_S:
                last_news_s, last_stage = now, stage
                self._waiting[request.id] = messages.Progress(id=request.id, stage=stage, done=done, total=total)
                self._say(self._waiting[request.id])

        if self._is_opening or self._reader is not None:
            raise ProtocolError("one connection reads one data set; open another connection for another data set")
        self._is_opening = True
        try:
            # The engines take half a second to load, and many on a busy node: on a thread, or this would seem to hang.
            await asyncio.to_thread(import_module, "cacheloader.transport.direct_datasets")
            self._reader = await self._datasets().open(content, digest=request.digest, progress=progress)
        finally:
            self._is_opening = False
        manifest = self._reader.manifest
        fd = fdpass.sealed_memory_file("cacheloader-manifest", manifest.to_bytes())
        self._say(messages.DatasetReady(id=request.id, digest=manifest.digest), fd)
        os.close(fd)

    async def _lend(self, request: messages.Acquire) -> None:
        data, was_here = await self._opened().acquire(request.shard)
        source = "memory" if was_here else "origin"
        self._say(messages.Leased(id=request.id, size_bytes=data.size_bytes, source=source), data.data_fd)
        self._say(messages.LeasedIndex(id=request.id, size_bytes=data.index_bytes), data.index_fd)

    def _opened(self) -> DirectReader:
        if self._reader is None:
            raise ProtocolError("no data set is open on this connection")
        return self._reader

    def _work(self, request_id: int, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(self._guarded(request_id, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._waiting[request_id] = messages.Progress(id=request_id, stage="asking the origin", done=0, total=0)
        if self._beat is None:
            self._beat = self._loop.call_later(messages.HEARTBEAT_S, self._give_signs_of_life)

    def _give_signs_of_life(self) -> None:
        self._beat = None
        if self._waiting and not self._ended.is_set():
            if not self._outgoing:
                for news in self._waiting.values():
                    self._say(news)
            self._beat = self._loop.call_later(messages.HEARTBEAT_S, self._give_signs_of_life)

    async def _guarded(self, request_id: int, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except CacheloaderError as error:
            self._fail(request_id, error)
        except Exception as error:  # noqa: BLE001  (an answer that never comes would be worse)
            _log.exception("request %d failed", request_id)
            self._fail(request_id, DaemonError(f"reading without a daemon failed: {type(error).__name__}: {error}"))
        finally:
            self._waiting.pop(request_id, None)

    def _fail(self, request_id: int, error: CacheloaderError) -> None:
        self._say(frames.failed(request_id, error))

    def _say(self, reply: messages.Reply, fd: int | None = None) -> None:
        if self._ended.is_set():
            return
        # A copy: the shard may be given back and dropped before the client reads this.
        self._outgoing.append((frames.encode(reply), None if fd is None else os.dup(fd)))
        if len(self._outgoing) == 1:
            self._write()

    def _write(self) -> None:
        while self._outgoing:
            data, fd = self._outgoing[0]
            try:
                fdpass.send(self._sock, data, fd)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._write)
                return
            except OSError:
                self._end()
                return
            self._outgoing.popleft()
            _close(fd)
        self._loop.remove_writer(self._sock.fileno())

    def _end(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._ended.set()


def content_of(fd: int | None) -> bytes:
    """All bytes of the file ``fd``, which is closed; none where there is no file."""
    if fd is None:
        return b""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
