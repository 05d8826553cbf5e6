"""litdata: chunks in its own format, downloaded to a local folder and kept there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import OPENED
from benchmarks.peers.keyed_batches import KeyedBatches
from benchmarks.peers.tar_samples import tar_samples

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.meter import PhaseClock

CHUNK_BYTES = "64MB"
LARGE_BYTES = 64 << 10
"""Mean sample from which the library decodes in smaller blocks."""


class LitdataLoader(KeyedBatches):
    """``StreamingDataLoader`` over a ``StreamingDataset``, shuffled, cache limit out of reach.

    Args:
        decode: Whether each payload is turned into pixels where the library's documentation does that.
    """

    is_cached = True

    def __init__(self, *, decode: bool = False) -> None:
        super().__init__(decode=decode)
        self._blocks: dict[str, Any] = {}

    def prepare(self, task: Task) -> None:
        """Import, and let its engine speak plain HTTP, which it refuses by default."""
        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = f"{task.folder}/optimizer"
        import litdata
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
        self._workers = task.num_workers
        _ = litdata.StreamingDataset

    def open(self, task: Task, clock: PhaseClock) -> Iterable[Any]:
        """Make data set and loader."""
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.streaming.resolver import Dir

        more: dict[str, Any] = {"collate_fn": columns}
        transform = None
        if self._decode:
            from benchmarks.peers.decoding import decoded_sample as transform

            more = {}
        origin = task.origin()
        # Large samples are decoded in blocks of fewer than are shuffled together, and where two workers share a chunk,
        # each block reads the whole chunk again: the two sizes go together.
        if task.expected.size_bytes >= LARGE_BYTES * task.expected.samples:
            self._blocks = {"batch_decode": task.batch_size, "item_shuffle_window": task.batch_size}
        dataset = StreamingDataset(
            **self._blocks,
            transform=transform,
            input_dir=Dir(
                path=str(Path(task.folder, "cache")), url=f"s3://{origin.bucket}/{origin.prefix.rstrip('/')}"
            ),
            storage_options={
                "endpoint_url": origin.endpoint_url,
                "aws_access_key_id": origin.key,
                "aws_secret_access_key": origin.secret,
                "region_name": origin.region,
            },
            shuffle=True,
            drop_last=False,
        )
        clock.mark(OPENED)
        loader: Iterable[Any] = StreamingDataLoader(
            dataset,
            batch_size=task.batch_size,
            num_workers=task.num_workers,
            persistent_workers=task.num_workers > 0,
            **more,
        )
        return loader

    @property
    def configuration(self) -> dict[str, Any]:
        """How it was set up."""
        return {
            "loader": "StreamingDataLoader(StreamingDataset(shuffle=True)), chunks of 64 MB, no compression",
            "cache": "its default limit, never reached",
            "engine": "obstore, told to allow http",
            "blocks": self._blocks or "its defaults",
            "workers": f"{self._workers}, persistent",
        }


def columns(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """A batch: keys and payloads in two lists; torch's default takes litdata's bytes for sequences of numbers."""
    return {"key": [sample["key"] for sample in samples], "bin": [bytes(sample["bin"]) for sample in samples]}


def sample(item: tuple[str, bytes]) -> dict[str, Any]:
    """What ``optimize`` stores for one input."""
    return {"key": item[0], "bin": item[1]}


def write(source: Path, target: Path) -> None:
    """Write the samples of the tars in ``source`` as litdata chunks."""
    from litdata import optimize

    items = []
    for path in sorted(source.glob("*.tar")):
        with path.open("rb") as file:
            items += tar_samples(file)
    optimize(fn=sample, inputs=items, output_dir=str(target), chunk_bytes=CHUNK_BYTES, num_workers=1)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
