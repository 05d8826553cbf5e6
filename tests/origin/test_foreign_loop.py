"""The daemon runs on uvloop, and an engine may be used by several loops of a process, one after the other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from cacheloader.errors import OriginNotFound
from cacheloader.keys import ByteRange
from cacheloader.manifest.asking import PatientOrigin
from cacheloader.origin.open import open_origin
from cacheloader.origin.slots import TransferSlots
from cacheloader.origin.transfer import TransferLimits, transfer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cacheloader.origin.base import Bytes
    from tests.support.seaweedfs import SeaweedServer

BODY = bytes(range(256)) * 2000
LIMITS = TransferLimits(part_bytes=50_000, timeout_floor_s=60.0, deadline_s=60.0)
"""No machine pauses for so long."""


async def use(url: str, options: dict[str, object], engine: str) -> None:
    origin = open_origin(url, storage_options=options, engine=engine)
    [info] = await PatientOrigin(origin, stranger=LIMITS).search(url, keep=lambda _: True, seen=lambda _: None)
    assert info == await origin.stat(info.uri)
    received = bytearray(info.size_bytes)

    async def write_at(offset_bytes: int, body: Bytes) -> None:
        received[offset_bytes : offset_bytes + len(memoryview(body))] = body

    await transfer(origin, info, write_at, limits=LIMITS, slots=TransferSlots())
    assert received == BODY
    with pytest.raises(OriginNotFound):
        await origin.stat(f"{info.uri}-missing")
    whole = ByteRange(start=0, stop=info.size_bytes)
    reads = [asyncio.ensure_future(origin.read_range(info.uri, whole, version="")) for _ in range(4)]
    await asyncio.sleep(0)
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    await origin.aclose()


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_object_stores_work_on_one_loop_after_another(
    s3_server: SeaweedServer,
    s3: Any,
    bucket: str,
    prefix: str,
    engine: str,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
):
    s3.put_object(Bucket=bucket, Key=f"{prefix}object", Body=BODY)
    for _ in range(2):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(use(f"s3://{bucket}/{prefix}", s3_server.storage_options, engine))


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("engine", ["mount", "fsspec"])
def test_files_work_on_one_loop_after_another(
    tmp_path: Path, engine: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
):
    (tmp_path / "object").write_bytes(BODY)
    for _ in range(2):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(use(f"file://{tmp_path}/", {}, engine))
