"""File systems of fsspec that are no one else's: each thread has one, for as long as it can be trusted."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cacheloader.errors import OriginError
from cacheloader.keys import ByteRange
from cacheloader.origin.filesystem_threads import FilesystemThreads
from cacheloader.origin.open import open_origin

BODY = bytes(range(256)) * 64


class Connection:
    """What is there once for a thread, and says who asked it."""

    def __init__(self) -> None:
        self.askers: list[int] = []

    def ask(self) -> Connection:
        self.askers.append(threading.get_ident())
        return self


async def test_requests_at_once_go_to_as_many_file_systems_and_each_serves_one_thread():
    threads = FilesystemThreads(Connection, max_threads=4, name="test")
    all_here = threading.Barrier(4)

    def ask(connection: Connection) -> Connection:
        all_here.wait(60)
        return connection.ask()

    asked = [one for _ in range(3) for one in await asyncio.gather(*(threads.ask(ask) for _ in range(4)))]
    threads.close()
    assert len(set(asked)) == 4
    assert all(len(set(one.askers)) == 1 for one in asked)


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(FileNotFoundError("none"), True), (ConnectionResetError("gone"), False), (EOFError(), False)],
)
async def test_a_file_system_whose_request_failed_is_asked_again_only_if_that_was_an_answer(error, is_kept):
    threads = FilesystemThreads(Connection, max_threads=1, name="test")

    def fail(connection: Connection) -> None:
        connection.ask()
        raise error

    before = await threads.ask(Connection.ask)
    with pytest.raises(type(error)):
        await threads.ask(fail)
    assert (await threads.ask(Connection.ask) is before) is is_kept
    threads.close()


class OneThread(MemoryFileSystem):
    """Refuses whoever did not make it, and fails once where it is told to."""

    protocol = "onethread"
    fails: list[Exception] = []  # noqa: RUF012 - set by a test
    made: list[int] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._maker = threading.get_ident()
        self.made.append(self._maker)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("onethread://", "memory://")))

    def _is_ours(self) -> None:
        assert threading.get_ident() == self._maker, "asked by another thread"

    def info(self, path: str, **options: Any) -> Any:
        self._is_ours()
        if self.fails:
            raise self.fails.pop()
        return super().info(path, **options)

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        self._is_ours()
        return super().find(path, *args, **options)

    def cat_file(self, path: str, *args: Any, **options: Any) -> bytes:
        self._is_ours()
        return bytes(super().cat_file(path, *args, **options))


async def test_an_origin_asks_no_file_system_from_another_thread_and_goes_on_when_one_fails():
    fsspec.register_implementation("onethread", f"{__name__}.OneThread", clobber=True)  # as a package does
    MemoryFileSystem().pipe_file("/set/object", BODY)
    origin = open_origin("onethread://set/")
    [info] = [info async for info in origin.list("onethread://set/")]
    edges = [(first, first + 100) for first in range(0, 10_000, 100)]
    bodies = await asyncio.gather(
        *(origin.read_range(info.uri, ByteRange(start=a, stop=b), version=info.version) for a, b in edges)
    )
    assert b"".join(bodies) == BODY[:10_000]
    assert len(set(OneThread.made)) == len(OneThread.made)
    OneThread.fails.append(ConnectionResetError("the connection is gone"))
    with pytest.raises(OriginError, match="the connection is gone"):
        await origin.stat(info.uri)
    assert await origin.stat(info.uri) == info
    await origin.aclose()


async def test_reading_a_file_in_memory_does_not_move_the_place_that_all_its_readers_share():
    MemoryFileSystem().pipe_file("/shared/object", BODY)
    file = MemoryFileSystem.store["/shared/object"]
    file.seek(7)
    origin = open_origin("memory://shared/")
    info = await origin.stat("memory://shared/object")
    assert await origin.read_range(info.uri, ByteRange(start=300, stop=5000), version=info.version) == BODY[300:5000]
    assert file.tell() == 7
    await origin.aclose()
