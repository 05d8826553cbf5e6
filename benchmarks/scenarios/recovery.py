"""How long a restarted daemon takes to know its blobs again, and to hand out the first."""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.contestants.recovery import CACHE, CACHE_SIZE, SHARDS, start_daemon
from benchmarks.harness.contestant import Task
from benchmarks.harness.measurement import Tally
from benchmarks.harness.meter import sample_checksum
from benchmarks.harness.packing import pack
from benchmarks.harness.report import Comparison
from benchmarks.harness.runner import Entry
from benchmarks.scenarios.scenario import Prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

INDEXES = {
    "index there": "there",
    "index deleted": "deleted",
    "index corrupt": "corrupt",
    "power failed": "power failed",
}

COMPARISONS = (
    Comparison(
        name="recovery, index deleted / index there",
        over=("index deleted", "recovery"),
        under=("index there", "recovery"),
    ),
    Comparison(
        name="recovery, power failed / index there",
        over=("power failed", "recovery"),
        under=("index there", "recovery"),
    ),
)

NOTES = (
    "A cache of one directory with many small blobs and those of eight shards. A sample is a blob here, and MB/s mean "
    "nothing: 100,000 blobs in less than two seconds are more than 50,000 samples/s.",
    "recovery: in one process, from the configuration to a planner that knows every blob: lock, names, index, disk, "
    "planner.",
    "restart: from the start of the daemon's process. open s: clients can connect. first batch s: a client has opened "
    "a data set of eight cached shards, anew, and holds its first lease. fetch p50 ms: the lease alone.",
    "power failed: the index is there and not trusted; every blob is in doubt until its time stamp is looked at.",
    "Every key and length is compared with what was put there, and the leased shard's bytes with the shard.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The scenario.

    Attributes:
        blobs: In the cache, besides those of the data set.
        blob_bytes: Of each.
        index_bytes: Of each one's sample index.
    """

    theme: ClassVar[str] = "recovery"
    labels: ClassVar[Sequence[str]] = tuple(INDEXES)

    blobs: int = 100_000
    blob_bytes: int = 1000
    index_bytes: int = 100

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:
        """Fill a cache."""
        size = Recovery(blobs=2000) if small else self
        folder.mkdir(parents=True, exist_ok=True)
        packed = pack(folder / SHARDS, samples=64, sample_bytes=10_000, shards=8)
        _cache_shards(folder)
        _add_blobs(folder / CACHE, size)
        blobs = _blobs_of(folder / CACHE)
        expected = Tally(
            samples=len(blobs),
            size_bytes=sum(len(str(length)) for length in blobs.values()),
            checksum=sum(sample_checksum(key, str(length).encode()) for key, length in blobs.items()) % 2**64,
        )
        yield Prepared(
            entries=[size.entry(label, folder, packed.names, expected) for label in INDEXES],
            comparisons=COMPARISONS,
            parameters={"blobs": len(blobs), "blob_bytes": size.blob_bytes, "index_bytes": size.index_bytes},
            notes=NOTES,
        )

    def entry(self, label: str, folder: Path, names: Sequence[str], expected: Tally) -> Entry:
        """One state of the index."""
        return Entry(
            label=label,
            factory="benchmarks.contestants.recovery:Restart",
            options={"index": INDEXES[label]},
            task=Task(
                folder="",
                source_folder=str(folder),
                reads="",
                shard_names=list(names),
                shard_bytes=[],
                store=None,
                expected=expected,
                batch_size=1,
                num_workers=0,
                warm_epochs=0,
            ),
        )


def _cache_shards(folder: Path) -> None:
    """Have a daemon fetch the data set."""
    from cacheloader.config import TransportOptions
    from cacheloader.protocol.messages import DatasetSpec
    from cacheloader.transport.open import open_transport

    daemon = start_daemon(folder / CACHE, folder / "daemon.log")
    try:
        transport = open_transport(TransportOptions(daemon=f"unix://{folder / CACHE}/daemon.sock"))
        manifest = transport.open_dataset(DatasetSpec(urls=[str(folder / SHARDS)], format=""), digest="", progress=None)
        for shard in range(len(manifest)):
            transport.acquire(shard).release()
        transport.close()
    finally:
        daemon.terminate()
        daemon.wait(timeout=30)


def _add_blobs(cache: Path, size: Recovery) -> None:
    """Files as the store names them; a daemon that starts finds them."""
    from cacheloader_daemon.config import DaemonConfig
    from cacheloader_daemon.storage import open_pool
    from cacheloader_daemon.store.names import BlobName

    data, index = secrets.token_bytes(size.blob_bytes), secrets.token_bytes(size.index_bytes)
    for number in range(size.blobs):
        key = (number % 256).to_bytes(1, "big") + secrets.token_bytes(15)
        name = BlobName(
            key=key, size_bytes=size.blob_bytes, crc32c=number, index_bytes=size.index_bytes, index_crc32c=number
        )
        blobs = cache / "blobs" / name.folder
        if number < 256:
            blobs.mkdir(mode=0o700, exist_ok=True)
        for file, content in ((name.data, data), (name.index, index)):
            fd = os.open(blobs / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o440)
            os.write(fd, content)
            os.close(fd)
    with open_pool(DaemonConfig(cache_dir=cache, cache_size=CACHE_SIZE)) as pool:
        pool.sync()


def _blobs_of(cache: Path) -> dict[str, int]:
    """Length of each blob by key, from the names of the files."""
    blobs = {}
    for path in (cache / "blobs").glob("*/*.data"):
        key, length, *_ = path.name.split("-")
        blobs[key] = int(length)
    return blobs


SCENARIO = Recovery()
