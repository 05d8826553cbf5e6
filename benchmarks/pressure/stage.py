"""What a measurement runs on: a real S3 server behind a link that counts and throttles, and a real daemon."""

from __future__ import annotations

import io
import json
import tarfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheloader.config import TransportOptions
from cacheloader.demo.link import SlowLink
from cacheloader.demo.seaweedfs import SeaweedServer, storage_options
from cacheloader.transport.control import read_status
from tests.support.fault_proxy import FaultProxy
from tests.support.node_daemon import NodeDaemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BUCKET = "pressure"
START_TIMEOUT_S = 60.0
UNTHROTTLED = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The data set.

    Attributes:
        num_shards: Tar files.
        samples_per_shard: In each.
        sample_bytes: Payload of each sample; each also takes a header of 512 bytes.
        batches_per_shard: Steps in which a shard is read.
    """

    num_shards: int
    samples_per_shard: int
    sample_bytes: int
    batches_per_shard: int = 2

    @property
    def num_samples(self) -> int:
        """Of all shards."""
        return self.num_shards * self.samples_per_shard

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return max(1, self.samples_per_shard // self.batches_per_shard)

    @property
    def prefix(self) -> str:
        """Where it lies in the bucket."""
        return f"{self.num_shards}x{self.samples_per_shard}x{self.sample_bytes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stocked:
    """A data set in the store.

    Attributes:
        port: Of the store.
        shape: What was packed.
        shard_bytes: Length of each shard.
    """

    port: int
    shape: Shape
    shard_bytes: int

    @property
    def dataset_bytes(self) -> int:
        """All shards."""
        return self.shape.num_shards * self.shard_bytes


def stock(server: SeaweedServer, shape: Shape) -> Stocked:
    """Pack the shards into the store, with their counts beside them."""
    generator = np.random.default_rng(3)
    client = server.client()
    if BUCKET not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket=BUCKET)
    counts, block = [], io.BytesIO()
    for shard in range(shape.num_shards):
        block = io.BytesIO()
        with tarfile.open(fileobj=block, mode="w") as archive:
            for sample in range(shape.samples_per_shard):
                info = tarfile.TarInfo(f"{shard:05d}-{sample:03d}.bin")
                info.size = shape.sample_bytes
                archive.addfile(info, io.BytesIO(generator.bytes(shape.sample_bytes)))
        name = f"train-{shard:05d}.tar"
        client.put_object(Bucket=BUCKET, Key=f"{shape.prefix}/{name}", Body=block.getvalue())
        counts.append({"url": name, "nsamples": shape.samples_per_shard})
    sidecar = json.dumps({"wids_version": 1, "shardlist": counts}).encode()
    client.put_object(Bucket=BUCKET, Key=f"{shape.prefix}/shards.json", Body=sidecar)
    return Stocked(port=server.port, shape=shape, shard_bytes=len(block.getvalue()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A daemon with an empty cache, and the link to the store.

    Attributes:
        socket: Where the daemon listens.
        link: Counts what the store sends.
    """

    socket: Path
    link: SlowLink

    @property
    def daemon_url(self) -> str:
        """For ``RemoteDataset(daemon=…)``."""
        return f"unix://{self.socket}"

    @property
    def storage_options(self) -> dict[str, object]:
        """The store through the link."""
        return storage_options(f"http://127.0.0.1:{self.link.port}")

    def plan(self) -> dict[str, Any]:
        """The planner's statistics."""
        plan: dict[str, Any] = read_status(TransportOptions(daemon=self.daemon_url))["plan"]
        return plan


@contextmanager
def staged(
    folder: Path,
    stocked: Stocked,
    *,
    cache_bytes: int,
    eviction: str,
    hedge_share: float = 0.0,
    latency_of: Callable[[], float] | None = None,
) -> Iterator[Stage]:
    """A daemon of its own below ``folder`` for as long as the block runs.

    Args:
        folder: Made.
        stocked: The store.
        cache_bytes: The quota.
        eviction: ``"plan"`` or ``"lru"``.
        hedge_share: Part of all requests that may be asked a second time.
        latency_of: Draws the wait before each answer of the store, ``None`` for none.
    """
    folder.mkdir(parents=True)
    socket = folder / "d.sock"
    config = folder / "daemon.toml"
    config.write_text(f'socket = "{socket}"\neviction = "{eviction}"\nhedge_share = {hedge_share}\n')
    with ExitStack() as ends:
        port = stocked.port
        if latency_of is not None:
            proxy = FaultProxy(port).start()
            ends.callback(proxy.stop)
            proxy.latency_of = latency_of  # type: ignore[attr-defined]
            port = proxy.port
        link = ends.enter_context(SlowLink(port=port, bytes_per_s=UNTHROTTLED, delay_s=0.0))
        daemon = NodeDaemon(
            folder / "cache", cache_size=str(cache_bytes), private=False, arguments=["--config", str(config)]
        )
        ends.callback(daemon.stop)
        daemon.start(timeout_s=START_TIMEOUT_S)
        yield Stage(socket=socket, link=link)
