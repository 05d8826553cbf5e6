"""A peer that speaks the protocol on a real socket and misbehaves on demand."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cacheloader import fdpass
from cacheloader.manifest.record import Manifest, ShardInfo
from cacheloader.protocol import frames, messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

SHARDS = {f"mem://s/{i}.tar": bytes([65 + i]) * (1000 + i) for i in range(4)}


def index_of(uri: str) -> bytes:
    return (1).to_bytes(8, "little") + uri.encode()


class ScriptedPeer:
    """Serves ``shards`` on a thread per connection, until told otherwise.

    ``on[Acquire] = function(peer, sock, request)`` replaces the answer to that kind of request. Requests are kept in
    ``received``, with the content of the descriptor that came with them in ``payloads``.
    """

    def __init__(self, path: Path, shards: Mapping[str, bytes] = SHARDS) -> None:
        self.path = path
        self.shards = dict(shards)
        infos = [
            ShardInfo(uri=uri, size_bytes=len(data), version="1", num_samples=1) for uri, data in self.shards.items()
        ]
        self.manifest = Manifest.build(infos, format="test", origin_id="scripted")
        self.on: dict[type, Callable[[ScriptedPeer, socket.socket, Any], None]] = {}
        self.received: list[messages.Request] = []
        self.payloads: list[bytes] = []
        self.connections: list[socket.socket] = []
        self.num_connections = 0
        self.quota_bytes = 2**30
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()

    def __enter__(self) -> ScriptedPeer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with suppress(FileNotFoundError):
            self.path.unlink()
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Die as a killed daemon does: nobody listens any more, the socket file stays."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
            self._threads.pop(0).join(60)  # whom it has accepted is among the connections from here on
        self.drop()
        for thread in self._threads:
            thread.join(60)
        self._threads.clear()

    def drop(self) -> None:
        """Break every connection."""
        # Who hears of it at once may have connected anew before all are broken.
        broken, self.connections = self.connections, []
        for sock in broken:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def requests(self, kind: type) -> list[Any]:
        return [request for request in self.received if isinstance(request, kind)]

    def wait_for(self, kind: type, count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests(kind)) >= count, timeout=60), self.received

    def say(self, sock: socket.socket, reply: messages.Reply, content: bytes | None = None) -> None:
        fd = None if content is None else fdpass.sealed_memory_file(f"scripted-{type(reply).__name__}", content)
        try:
            fdpass.send(sock, frames.encode(reply), fd)
        finally:
            if fd is not None:
                os.close(fd)

    def lease(self, sock: socket.socket, request: messages.Acquire, *, source: str = "nvme") -> None:
        uri = self.manifest.uri(request.shard)
        data, index = self.shards[uri], index_of(uri)
        self.say(sock, messages.Leased(id=request.id, size_bytes=len(data), source=source), data)
        self.say(sock, messages.LeasedIndex(id=request.id, size_bytes=len(index)), index)

    def _spawn(self, work: Callable[[socket.socket], None], sock: socket.socket) -> None:
        thread = threading.Thread(target=work, args=(sock,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            self.connections.append(sock)
            self.num_connections += 1
            self._spawn(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            while True:
                try:
                    received = fdpass.receive(sock)
                except OSError:
                    return
                if not received.data:
                    return
                payload = b""
                if received.fd is not None:
                    payload = os.pread(received.fd, os.fstat(received.fd).st_size, 0)
                    os.close(received.fd)
                request = frames.decode_request(received.data)
                with self._changed:
                    self.received.append(request)
                    self.payloads.append(payload)
                    self._changed.notify_all()
                with suppress(OSError):
                    self.on.get(type(request), ScriptedPeer._answer)(self, sock, request)

    def _answer(self, sock: socket.socket, request: messages.Request) -> None:
        match request:
            case messages.Hello():
                self.say(
                    sock, messages.Welcome(version=1, daemon="scripted", pid=os.getpid(), quota_bytes=self.quota_bytes)
                )
            case messages.OpenDataset():
                self.say(
                    sock,
                    messages.DatasetReady(id=request.id, digest=self.manifest.digest),
                    bytes(self.manifest.to_bytes()),
                )
            case messages.FollowPlan():
                self.say(sock, messages.Accepted(id=request.id))
            case messages.Acquire():
                self.lease(sock, request)
            case _:
                pass
