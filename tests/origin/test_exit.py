"""A process that reads and ends at once must end well: obstore's threads used to abort it (SIGABRT)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.seaweedfs import SeaweedServer

ROOT = Path(__file__).parents[2]
READER = """
import asyncio, json, sys
from cacheloader.keys import ByteRange
from cacheloader.origin.open import open_origin

async def main(options, uri, close):
    origin = open_origin(uri, storage_options=options)
    info = await origin.stat(uri)
    part = ByteRange(start=0, stop=4)
    reads = [origin.read_range(uri, part, version=info.version) for _ in range(8)]
    assert {bytes(body) for body in await asyncio.gather(*reads)} == {b"body"}
    tasks = [asyncio.ensure_future(origin.read_range(uri, part, version="")) for _ in range(8)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if close:
        await origin.aclose()

asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3] == "close"))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("close", ["close", "just end"])
def test_twenty_processes_that_read_and_end_at_once_all_end_well(
    s3_server: SeaweedServer, s3: Any, bucket: str, prefix: str, close: str
):
    s3.put_object(Bucket=bucket, Key=f"{prefix}object", Body=b"body")
    command = [
        sys.executable, "-c", READER, json.dumps(s3_server.storage_options), f"s3://{bucket}/{prefix}object", close
    ]  # fmt: skip
    for _ in range(10):
        pair = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        for process in pair:
            _, errors = process.communicate(timeout=120)
            assert (process.returncode, errors) == (0, b"")
