"""The object store of a benchmark: SeaweedFS on this machine, which counts what it sends."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness import page_cache
from benchmarks.harness.contestant import Store
from cacheloader.demo.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedServer, free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.harness.packing import PackedShards

BUCKET = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStore:
    """A started server.

    Attributes:
        server: SeaweedFS.
        metrics_url: Where it says how many bytes of object bodies it has sent.
    """

    server: SeaweedServer
    metrics_url: str

    def upload(self, packed: PackedShards, prefix: str, *, with_counts: bool) -> Store:
        """Put the shards below ``prefix``, with ``shards.json`` beside them or without."""
        client = self.server.client()
        names = packed.names + (["shards.json"] if with_counts else [])
        for name in names:
            with (packed.folder / name).open("rb") as body:
                client.put_object(Bucket=BUCKET, Key=prefix + name, Body=body)
        return Store(
            endpoint_url=self.server.endpoint_url,
            bucket=BUCKET,
            prefix=prefix,
            key=ACCESS_KEY,
            secret=SECRET_KEY,
            region=REGION,
            size_bytes=sum((packed.folder / name).stat().st_size for name in names),
        )

    def upload_folder(self, folder: Path, prefix: str) -> int:
        """Put every file of ``folder`` below ``prefix``; returns their length together."""
        client = self.server.client()
        size_bytes = 0
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                with path.open("rb") as body:
                    client.put_object(Bucket=BUCKET, Key=f"{prefix}{path.relative_to(folder)}", Body=body)
                size_bytes += path.stat().st_size
        return size_bytes

    def warm(self) -> None:
        """Let the kernel hold the store's files in memory."""
        page_cache.warm(page_cache.files_below(self.server.directory / "data"))


@contextmanager
def running_store(folder: Path) -> Iterator[RunningStore]:
    """SeaweedFS with an empty bucket, stopped at the end."""
    folder.mkdir(parents=True)
    metrics_port = next(free_ports())
    # The path of a unix socket may have 107 characters, and the disk under test may be mounted anywhere.
    with tempfile.TemporaryDirectory(prefix="bench-") as sockets:
        flags = [
            f"-metricsPort={metrics_port}",
            f"-filer.localSocket={sockets}/f.sock",
            f"-s3.localSocket={sockets}/s.sock",
        ]
        server = SeaweedServer(folder, arguments=flags)
        server.start()
        try:
            server.client().create_bucket(Bucket=BUCKET)
            yield RunningStore(server=server, metrics_url=f"http://127.0.0.1:{metrics_port}/metrics")
        finally:
            server.stop()
