"""The worker process behind ``prepare``: reads a shard that it was handed and builds its index.

It knows no path, and leaves when its daemon does: the socket it reads from is then at its end. Run as
``python -m cacheloader_daemon.indexer FD NICE`` with one end of a SEQPACKET pair and what to add to its niceness.
"""

from __future__ import annotations

import os
import socket
import sys

import msgspec

from cacheloader import fdpass
from cacheloader.errors import CacheloaderError, CorruptShard, ProtocolError
from cacheloader.protocol.frames import MAX_FAILURE_CHARACTERS, sendable

LOWEST_PRIORITY = 19
"""The training process and its collectives go first whenever they want a core."""


class PrepareShard(msgspec.Struct, frozen=True, kw_only=True):
    """What to do. + fd: the shard, readable.

    Attributes:
        format: Name of the shard's format.
        uri: Named in errors.
        size_bytes: Length of the shard.
    """

    format: str
    uri: str
    size_bytes: int


class ShardPrepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came out. + fd: sealed memory file with the index.

    Attributes:
        index_bytes: Length of the index.
    """

    index_bytes: int


class PrepareFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why nothing came out; the fields are those of ``protocol.messages.Failed``."""

    kind: str
    message: str
    uri: str


def prepare(task: PrepareShard, fd: int) -> tuple[ShardPrepared, int]:
    """The index of the shard in ``fd``, as a sealed memory file that the caller closes, and its description.

    Raises:
        CorruptShard: The shard is none of its format.
        OSError: The disk does not give the bytes back.
    """
    from cacheloader.formats.registry import named
    from cacheloader.formats.source import FileSource

    if task.size_bytes == 0:
        raise CorruptShard(f"{task.uri} holds no bytes, so it is no {task.format} shard", uri=task.uri)
    try:
        index = named(task.format).build_index(FileSource(fd, size_bytes=task.size_bytes), uri=task.uri)
    except OSError as error:
        if error.errno is not None:
            raise
        # A read beyond the end: the file was whole a moment ago, so the format followed a wrong pointer.
        raise CorruptShard(f"{task.uri} is no whole {task.format} shard: {error}", uri=task.uri) from error
    return ShardPrepared(index_bytes=len(index)), fdpass.sealed_memory_file("sample-index", index)


def serve(sock: socket.socket) -> None:
    """Answer until the daemon is gone."""
    decoder = msgspec.json.Decoder(PrepareShard)
    while True:
        received = fdpass.receive(sock)
        if not received.data:
            return
        if received.fd is None:
            raise ProtocolError("a shard to prepare came without its descriptor")
        index_fd: int | None = None
        answer: ShardPrepared | PrepareFailed
        try:
            answer, index_fd = prepare(decoder.decode(received.data), received.fd)
        except (CacheloaderError, OSError, MemoryError) as error:
            # Memory and read errors are this shard's bad luck; anything else is a defect and ends the process.
            answer = PrepareFailed(
                kind=type(error).__name__,
                message=sendable(str(error), MAX_FAILURE_CHARACTERS),
                uri=sendable(getattr(error, "uri", ""), MAX_FAILURE_CHARACTERS // 4),
            )
        finally:
            os.close(received.fd)
        try:
            fdpass.send(sock, msgspec.json.encode(answer), index_fd)
        finally:
            if index_fd is not None:
                os.close(index_fd)


def main() -> None:
    """Serve on the socket whose descriptor is the first argument."""
    # What the first shard will need is imported before the priority falls: it may have to come soon.
    import cacheloader.formats.registry  # noqa: F401

    os.nice(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        try:
            serve(sock)
        except (BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
            return


if __name__ == "__main__":
    main()
