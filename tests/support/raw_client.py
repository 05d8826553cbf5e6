"""A client of the daemon that knows the wire and nothing else: sends what it is told, true or false."""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from cacheloader import fdpass
from cacheloader.errors import from_wire
from cacheloader.manifest.record import Manifest
from cacheloader.protocol import frames, messages

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def shard_bytes(fd: int, size_bytes: int) -> bytes:
    """All bytes behind a descriptor."""
    return os.pread(fd, size_bytes, 0) if size_bytes else b""


@dataclass(kw_only=True)
class RawLease:
    data_fd: int
    index_fd: int
    leased: messages.Leased
    index: messages.LeasedIndex

    def read(self) -> bytes:
        return shard_bytes(self.data_fd, self.leased.size_bytes)

    def read_index(self) -> bytes:
        return shard_bytes(self.index_fd, self.index.size_bytes)

    def close(self) -> None:
        os.close(self.data_fd)
        os.close(self.index_fd)


@dataclass
class RawClient:
    """One connection; ``say`` and ``hear`` are the wire, the rest is convenience."""

    path: Path
    timeout_s: float = 60.0
    greet: bool = True
    sock: socket.socket = field(init=False)
    last_id: int = field(init=False, default=0)
    progress: list[messages.Progress] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(self.timeout_s)
        try:
            self._connect()
            if self.greet:
                self.welcome = self.ask(messages.Hello(oldest=1, newest=1, client="raw"))
        except BaseException:
            self.sock.close()
            raise

    def _connect(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return self.sock.connect(str(self.path))
            except BlockingIOError:  # the daemon's queue of connections is full
                if time.monotonic() > deadline:
                    raise
                select.select([], [], [], 0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def say(self, message: messages.Request | bytes, fd: int | None = None) -> None:
        fdpass.send(self.sock, message if isinstance(message, bytes) else frames.encode(message), fd)

    def hear(self) -> tuple[messages.Reply, int | None]:
        """The next reply; raises ``EOFError`` at the end."""
        received = fdpass.receive(self.sock)
        if not received.data:
            raise EOFError
        return frames.decode_reply(received.data), received.fd

    def answer(self) -> tuple[messages.Reply, int | None]:
        """The next reply that is no progress; a failure is raised as the error it names."""
        while True:
            reply, fd = self.hear()
            if isinstance(reply, messages.Failed):
                raise from_wire(reply.kind, reply.message, reply.uri)
            if not isinstance(reply, messages.Progress):
                return reply, fd
            self.progress.append(reply)

    def ask(self, message: messages.Request | bytes, fd: int | None = None) -> messages.Reply:
        self.say(message, fd)
        reply, reply_fd = self.answer()
        assert reply_fd is None
        return reply

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def open_dataset(
        self, urls: Sequence[str | Path], *, digest: str = "", options: dict[str, object] | None = None
    ) -> Manifest:
        self.ask_for_dataset(urls, digest=digest, options=options)
        return self.hear_dataset()

    def ask_for_dataset(
        self, urls: Sequence[str | Path], *, digest: str = "", options: dict[str, object] | None = None
    ) -> None:
        spec = messages.DatasetSpec(urls=[str(url) for url in urls], storage_options=options or {})
        fd = fdpass.sealed_memory_file("spec", frames.encode(spec))
        try:
            self.say(messages.OpenDataset(id=self.next_id(), digest=digest), fd)
        finally:
            os.close(fd)

    def hear_dataset(self) -> Manifest:
        reply, manifest_fd = self.answer()
        assert isinstance(reply, messages.DatasetReady)
        assert manifest_fd is not None
        with os.fdopen(manifest_fd, "rb") as file:
            manifest = Manifest.from_buffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        assert manifest.digest == reply.digest
        return manifest

    def follow(self, shards: Sequence[int], *, rows: int = 1, clock: int = 0) -> messages.Reply:
        """Announce one access a shard, each ``rows`` rows long, one behind the other."""
        first = np.arange(len(shards), dtype="<i8") * rows
        block = first.tobytes() + (first + rows).tobytes() + np.asarray(shards, dtype="<i4").tobytes()
        fd = fdpass.sealed_memory_file("plan", block)
        try:
            return self.ask(messages.FollowPlan(id=self.next_id(), num_accesses=len(shards), clock=clock), fd)
        finally:
            os.close(fd)

    def acquire(self, shard: int) -> RawLease:
        self.say(messages.Acquire(id=self.next_id(), shard=shard))
        return self.hear_lease()

    def hear_lease(self) -> RawLease:
        leased, data_fd = self.answer()
        index, index_fd = self.answer()
        assert isinstance(leased, messages.Leased)
        assert isinstance(index, messages.LeasedIndex)
        assert leased.id == index.id
        assert data_fd is not None
        assert index_fd is not None
        return RawLease(data_fd=data_fd, index_fd=index_fd, leased=leased, index=index)

    def release(self, shard: int) -> None:
        self.say(messages.Release(shard=shard))

    def advance(self, clock: int) -> None:
        self.say(messages.Advance(clock=clock))

    def status(self) -> bytes:
        self.say(messages.GetStatus(id=self.next_id()))
        reply, fd = self.answer()
        assert isinstance(reply, messages.Status)
        assert fd is not None
        with os.fdopen(fd, "rb") as file:
            return os.pread(fd, os.fstat(file.fileno()).st_size, 0)

    def stop(self) -> messages.Reply:
        return self.ask(messages.Stop(id=self.next_id()))
