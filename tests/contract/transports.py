"""The four ways to get shards, each with the same data set behind it."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import tarfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cacheloader.config import TransportOptions
from cacheloader.formats.webdataset import WebDatasetFormat
from cacheloader.protocol.messages import DatasetSpec
from cacheloader.transport.open import open_transport
from tests.support.memory_transport import MemoryTransport
from tests.support.parent_death import die_with_parent
from tests.support.raw_client import RawClient
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cacheloader.transport.base import Transport

NUM_SHARDS = 5
SAMPLES_PER_SHARD = 4
PATIENCE: dict[str, Any] = {"timeout_s": 100, "hello_timeout_s": 60, "launch_timeout_s": 100}
"""No time limit is at stake here, and a machine that is busy may pause for many seconds."""


def sample_text(shard: int, sample: int) -> bytes:
    return f"shard {shard} sample {sample} ".encode() * (50 + 7 * sample)


def tar_of(shard: int) -> bytes:
    block = io.BytesIO()
    with tarfile.open(fileobj=block, mode="w") as tar:
        for sample in range(SAMPLES_PER_SHARD):
            text = sample_text(shard, sample)
            member = tarfile.TarInfo(f"{shard:02d}{sample:02d}.txt")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return block.getvalue()


@dataclass(kw_only=True)
class Backend:
    """One way to get shards.

    ``folder`` holds the data set ``good/``, its last shards again in ``few/``, and a truncated shard in ``cut/``.
    """

    name: str
    folder: Path
    options: TransportOptions | None
    opened: list[Transport] = field(default_factory=list)

    def session(self) -> Transport:
        session: Transport
        if self.options is None:
            shards = {str(path): path.read_bytes() for path in sorted(self.folder.rglob("*.tar"))}
            session = MemoryTransport(shards, shard_format=WebDatasetFormat())
        else:
            session = open_transport(self.options)
        self.opened.append(session)
        return session

    def spec(self, name: str = "good/") -> DatasetSpec:
        return DatasetSpec(urls=[f"{self.folder}/{name}"])

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()


def write_data(folder: Path) -> None:
    for name, shards in (("good", range(NUM_SHARDS)), ("few", range(3, NUM_SHARDS))):
        (folder / name).mkdir(parents=True)
        for shard in shards:
            (folder / name / f"{shard}.tar").write_bytes(tar_of(shard))
    (folder / "cut").mkdir()
    (folder / "cut" / "cut.tar").write_bytes(tar_of(0)[:1800])


@contextmanager
def running(name: str, folder: Path) -> Iterator[Backend]:
    write_data(folder / "data")
    cache = folder / "cache"
    match name:
        case "memory":
            yield Backend(name=name, folder=folder / "data", options=None)
        case "direct":
            options = TransportOptions(daemon="none", cache_dir=cache, **PATIENCE)
            yield Backend(name=name, folder=folder / "data", options=options)
        case "embedded":
            options = TransportOptions(daemon="embedded", cache_dir=cache, cache_size="64MiB", **PATIENCE)
            try:
                yield Backend(name=name, folder=folder / "data", options=options)
            finally:
                if _listens(cache / "daemon.sock"):
                    with RawClient(cache / "daemon.sock") as client:
                        client.stop()
                    wait_until(lambda: not (cache / "daemon.sock").exists(), timeout_s=60)
        case "shared":
            path = folder / "shared.sock"
            with shared_daemon(folder, cache=cache, path=path):
                options = TransportOptions(daemon=f"unix://{path}", **PATIENCE)
                yield Backend(name=name, folder=folder / "data", options=options)


@contextmanager
def shared_daemon(folder: Path, *, cache: Path, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    config = folder / "daemon.toml"
    config.write_text(f'cache_dir = "{cache}"\ncache_size = "64MiB"\nsocket = "{path}"\nallow_local_paths = true\n')
    command = [sys.executable, "-m", "cacheloader_daemon", "--config", str(config)]
    with (folder / "shared.log").open("wb") as log:
        process = subprocess.Popen(die_with_parent(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: _listens(path) or process.poll() is not None, timeout_s=100)
        assert process.poll() is None, (folder / "shared.log").read_text()
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        return sock.connect_ex(str(path)) == 0
