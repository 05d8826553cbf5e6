"""The helper process that reads without a daemon: ``python -m cacheloader.transport.direct_worker --fd N``.

It serves exactly one client, over the socket that it inherits, and lives as long as that is open. All of it runs on
one event loop; what takes a processor goes to a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

import cacheloader
from cacheloader import fdpass
from cacheloader.errors import CacheloaderError, ConfigError, DaemonError, ProtocolError
from cacheloader.manifest.record import Manifest
from cacheloader.protocol import frames, messages
from cacheloader.transport.direct_manifests import ManifestFolder

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from cacheloader.transport.direct_dataset import DirectDataset

_MESSAGES_PER_TURN = 32
_PROGRESS_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


class Conversation:
    """The one client's requests and their answers.

    Args:
        sock: The connection.
        manifests: Where manifests are kept.
        memory_bytes: What may be held ready beside the shards that are leased.
    """

    def __init__(self, sock: socket.socket, *, manifests: ManifestFolder, memory_bytes: int) -> None:
        sock.settimeout(0.0)
        self._sock = sock
        self._manifests = manifests
        self._memory_bytes = memory_bytes
        self._loop = asyncio.get_running_loop()
        self._dataset: DirectDataset | None = None
        self._outgoing: deque[tuple[bytes, int | None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, messages.Progress] = {}  # request to the latest news of it
        self._beat: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Return when the client is gone."""
        self._loop.add_reader(self._sock.fileno(), self._read)
        await self._ended.wait()

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
                self._take(frames.decode_request(received.data), _content(received.fd))
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

        if self._dataset is not None:
            raise ProtocolError("one connection reads one data set; open another connection for another data set")
        # The engines take half a second to load: the greeting need not wait for that.
        from cacheloader.transport.direct_dataset import DirectDataset

        self._dataset = await DirectDataset.open(
            frames.decode_spec(content),
            digest=request.digest,
            manifests=self._manifests,
            memory_bytes=self._memory_bytes,
            progress=progress,
        )
        manifest = self._dataset.manifest
        fd = fdpass.sealed_memory_file("cacheloader-manifest", manifest.to_bytes())
        self._say(messages.DatasetReady(id=request.id, digest=manifest.digest), fd)
        os.close(fd)

    async def _lend(self, request: messages.Acquire) -> None:
        data, was_here = await self._opened().acquire(request.shard)
        source = "memory" if was_here else "origin"
        self._say(messages.Leased(id=request.id, size_bytes=data.size_bytes, source=source), data.data_fd)
        self._say(messages.LeasedIndex(id=request.id, size_bytes=data.index_bytes), data.index_fd)

    def _opened(self) -> DirectDataset:
        if self._dataset is None:
            raise ProtocolError("no data set is open on this connection")
        return self._dataset

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
            if fd is not None:
                os.close(fd)
        self._loop.remove_writer(self._sock.fileno())

    def _end(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._ended.set()


def _content(fd: int | None) -> bytes:
    if fd is None:
        return b""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()


async def _serve(options: argparse.Namespace) -> None:
    given = None
    if options.manifest_fd is not None:
        given = Manifest.from_buffer(_content(options.manifest_fd))
    manifests = ManifestFolder(options.manifest_dir, given=given)
    sock = socket.socket(fileno=options.fd)
    await Conversation(sock, manifests=manifests, memory_bytes=options.memory).run()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve the client at the other end of ``--fd`` until it goes away."""
    parser = argparse.ArgumentParser(prog="python -m cacheloader.transport.direct_worker", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="connected SEQPACKET socket, inherited")
    parser.add_argument("--memory", type=int, required=True, help="bytes that may be held beside leased shards")
    parser.add_argument("--manifest-dir", type=Path, required=True, help="where manifests are kept")
    parser.add_argument("--manifest-fd", type=int, help="memory file with the manifest of the data set, inherited")
    options = parser.parse_args(arguments)
    # Ctrl-C reaches every process of the terminal; the trainer decides what it means, and this follows it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options))
        # Nothing here outlives the client: there is nothing to finish, and no reason to wait for the engines' threads.
        os._exit(0)


if __name__ == "__main__":
    main()
