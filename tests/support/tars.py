"""Tar shards for tests, and what the webdataset package itself reads from them."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import numpy as np
import webdataset.tariterators as peer

from cacheloader.formats.webdataset import WebDatasetFormat
from tests.support.buffers import BufferSource

URI = "mem://bucket/shard.tar"


def packed(members: list[tuple[str, bytes]], *, format: int = tarfile.GNU_FORMAT, **fields: Any) -> bytes:  # noqa: A002
    """A tar of ``members`` in this order, by Python's own tarfile; ``fields`` are set on every header."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for field, value in fields.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def header(name: bytes, size: int | bytes = 0, *, kind: bytes = b"0", signed: bool = False, **fields: bytes) -> bytes:
    """One header block, field by field, for what no packer writes any more."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[124:136] = size if isinstance(size, bytes) else b"%011o\0" % size
    block[136:148] = b"00000000000\0"
    block[156:157] = kind
    block[257:265] = fields.get("magic", b"ustar\x0000")
    prefix = fields.get("prefix", b"")
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b" " * 8
    total = sum(memoryview(bytes(block)).cast("b")) if signed else sum(block)
    block[148:156] = b"%06o\0 " % total
    return bytes(block)


def padded(content: bytes) -> bytes:
    """``content`` filled up to whole blocks."""
    return content + bytes(-len(content) % 512)


END = bytes(1024)


def read_all(shard: bytes) -> list[dict[str, Any]]:
    """Every sample, as cacheloader reads them."""
    shard_format = WebDatasetFormat()
    source = BufferSource(shard)
    reader = shard_format.open(source, shard_format.build_index(source, uri=URI), uri=URI)
    return reader.read(np.arange(reader.num_samples))


def read_all_as_webdataset(shard: bytes) -> list[dict[str, Any]]:
    """Every sample, as the webdataset package reads them, without the URL that it adds."""
    members = peer.tar_file_expander(iter([{"url": URI, "stream": io.BytesIO(shard)}]))
    samples = list(peer.group_by_keys(members))
    for sample in samples:
        del sample["__url__"]
    return samples
