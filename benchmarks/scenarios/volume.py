"""A mounted volume that is as slow as an object store behind FUSE."""

from __future__ import annotations

import tarfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from benchmarks.harness.contestant import Task
from benchmarks.harness.packing import pack
from benchmarks.harness.report import Comparison
from benchmarks.harness.runner import Entry
from benchmarks.harness.slow_folder import slow_folder
from benchmarks.peers.stock import FILES
from benchmarks.scenarios.ground import BATCH_SIZE
from benchmarks.scenarios.scenario import Prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PRODUCT = "cacheloader, 0 workers"
PRODUCT_2 = "cacheloader, 2 workers"
STOCK_FILES = "stock, one file a sample, 2 workers"
STOCK_TARS = "stock, tars as streams, 2 workers"
LABELS = (PRODUCT, PRODUCT_2, STOCK_FILES, STOCK_TARS)

COLD_TARGET = 7.3
WARM_TARGET = 17.7
COMPARISONS = tuple(
    Comparison(
        name=f"{phase}, 2 workers / {stock}",
        over=(PRODUCT_2, phase),
        under=(stock, phase),
        target=target if stock == STOCK_FILES else None,
        goal=f"mount-{phase}" if stock == STOCK_FILES else "",
    )
    for stock in (STOCK_FILES, STOCK_TARS)
    for phase, target in (("cold", COLD_TARGET), ("warm", WARM_TARGET))
)

NOTES = (
    "The volume is a FUSE file system that serves a local folder. A read that does not continue the last one of its "
    "open file waits for the latency given below; an open file delivers at most the rate given below; files do not "
    "slow each other; nothing is cached by the kernel, since a data set is larger than memory. Its process shares the "
    "two cores.",
    "The stock loader reads one file a sample in shuffled order, which is what an image folder is. Beside it, the tars "
    "read as streams, each worker its own: that is as good as torch alone gets there.",
    "warm: the epoch after the first in the same process. The stock loaders read the volume again.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """The scenario.

    Attributes:
        samples: Size of the data set.
        sample_bytes: Payload of one sample.
        shards: Number of tar files.
        latency_s: Of a read that does not continue the last one.
        bytes_per_s: Most that one open file delivers.
    """

    theme: ClassVar[str] = "volume"
    labels: ClassVar[Sequence[str]] = LABELS

    samples: int = 960
    sample_bytes: int = 100_000
    shards: int = 4
    latency_s: float = 0.02
    bytes_per_s: float = 100e6

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:
        """Pack, unpack one file a sample, mount."""
        size = replace(self, samples=256, sample_bytes=10_000) if small else self
        packed = pack(folder / "packed", samples=size.samples, sample_bytes=size.sample_bytes, shards=size.shards)
        (packed.folder / FILES).mkdir()
        for name in packed.names:
            with tarfile.open(packed.folder / name) as tar:
                tar.extractall(packed.folder / FILES, filter="data")
        mounted = folder / "volume"
        with slow_folder(packed.folder, mounted, latency_s=size.latency_s, bytes_per_s=size.bytes_per_s) as server_pid:
            task = Task(
                folder="",
                source_folder=str(mounted),
                reads="",
                shard_names=packed.names,
                shard_bytes=packed.sizes_bytes,
                store=None,
                expected=packed.expected,
                batch_size=BATCH_SIZE,
                num_workers=0,
                warm_epochs=1,
                server_pid=server_pid,
            )
            product = {"loader": "benchmarks.contestants.cacheloader:CacheloaderLoader"}
            stock = "benchmarks.peers.stock:StockLoader"
            shared = replace(task, num_workers=2, has_disk_epoch=False)
            entries = [
                Entry(
                    label=label,
                    factory="benchmarks.contestants.epochs:Epochs",
                    options=options,
                    task=of,
                    is_peer=label in (STOCK_FILES, STOCK_TARS),
                )
                for label, options, of in (
                    (PRODUCT, product, task),
                    (PRODUCT_2, product, shared),
                    (STOCK_FILES, {"loader": stock, "options": {"of": "files"}}, shared),
                    (STOCK_TARS, {"loader": stock, "options": {"of": "tars"}}, shared),
                )
            ]
            yield Prepared(
                entries=entries,
                comparisons=COMPARISONS,
                parameters={
                    "samples": size.samples,
                    "sample_bytes": size.sample_bytes,
                    "shards": size.shards,
                    "batch_size": BATCH_SIZE,
                    "latency_s": size.latency_s,
                    "bytes_per_s_and_file": size.bytes_per_s,
                },
                notes=NOTES,
            )


SCENARIO = Volume()
