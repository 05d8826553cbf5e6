"""Descriptors to go with a frame: memory files of every kind, and what is none."""

from __future__ import annotations

import fcntl
import os
import socket
from typing import TYPE_CHECKING

import numpy as np

from cacheloader import fdpass
from cacheloader.protocol import frames, messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fuzz.frames_of_chaos import FrameMaker

SPARSE_BYTES = 2**40


class Descriptors:
    """Makes them; whoever asked closes them.

    Args:
        maker: Makes broken descriptions.
        urls: What they name.
    """

    def __init__(self, maker: FrameMaker, urls: Sequence[str]) -> None:
        self._maker = maker
        self._urls = urls

    def make(self, kind: str, data: bytes) -> int:
        """One of ``KINDS`` for the frame ``data``."""
        match kind:
            case "plan":
                return fdpass.sealed_memory_file("plan", _plan(_num_accesses(data)))
            case "plan of garbage":
                return fdpass.sealed_memory_file("plan", os.urandom(20 * _num_accesses(data)))
            case "spec":
                spec = messages.DatasetSpec(urls=list(self._urls[:1]))
                return fdpass.sealed_memory_file("spec", frames.encode(spec))
            case "spec of garbage":
                return fdpass.sealed_memory_file("spec", self._maker.spec(self._urls))
            case "unsealed" | "half sealed" | "empty" | "sparse":
                return _memory_file(kind)
            case "null device":
                return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            case "pipe":
                read, write = os.pipe()
                os.close(write)
                return read
            case "folder":
                return os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            case "socket":
                one, other = socket.socketpair()
                other.close()
                return one.detach()
            case _:
                return os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)


def _memory_file(kind: str) -> int:
    fd = os.memfd_create("odd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if kind != "empty":
        os.pwrite(fd, b"x" * 60, 0)
    if kind == "half sealed":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    if kind == "sparse":
        os.ftruncate(fd, SPARSE_BYTES)
    if kind in {"empty", "sparse"}:
        fdpass.seal(fd)
    return fd


def _num_accesses(data: bytes) -> int:
    try:
        request = frames.decode_request(data)
    except frames.ProtocolError:
        return 3
    return min(1000, max(0, getattr(request, "num_accesses", 3)))


def _plan(num_accesses: int) -> bytes:
    first = np.arange(num_accesses, dtype="<i8")
    return first.tobytes() + (first + 1).tobytes() + (first % 3).astype("<i4").tobytes()
