"""The little of HTTP/1.1 that a relay must understand: where a head ends and how long its body is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BLOCK_BYTES = 64 * 1024


@dataclass(slots=True)
class Head:
    """First line and headers of a request or a response."""

    first_line: str
    headers: list[tuple[str, str]] = field(default_factory=list)

    def get(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    def drop(self, name: str) -> None:
        self.headers = [(key, value) for key, value in self.headers if key.lower() != name]

    def encode(self) -> bytes:
        lines = [self.first_line, *(f"{key}: {value}" for key, value in self.headers), "", ""]
        return "\r\n".join(lines).encode("latin-1")


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head, ``None`` if the peer closed the connection before one."""
    try:
        block = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first_line, *lines = block.decode("latin-1").split("\r\n")[:-2]
    headers = [(key, value.strip()) for key, _, value in (line.partition(":") for line in lines)]
    return Head(first_line, headers)


async def read_body(reader: asyncio.StreamReader, head: Head, *, until_close: bool) -> AsyncIterator[bytes]:
    """The body's bytes as they stand on the wire (a chunked body keeps its chunk headers)."""
    if head.get("transfer-encoding").lower() == "chunked":
        while True:
            line = await reader.readuntil(b"\r\n")
            yield line
            size = int(line.split(b";")[0], 16)
            yield await reader.readexactly(size + 2)
            if size == 0:
                return
    length = head.get("content-length")
    if not length and not until_close:
        return
    left = int(length) if length else -1
    while left:
        block = await reader.read(min(left, BLOCK_BYTES) if left > 0 else BLOCK_BYTES)
        if not block:
            if left > 0:
                raise ConnectionError(f"the peer closed the connection {left} bytes before the end of a body")
            return
        left -= len(block) if left > 0 else 0
        yield block
