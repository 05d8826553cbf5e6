"""mosaicml-streaming: MDS shards, downloaded to a local folder and kept there."""

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

SHARD_BYTES = 64 << 20


class StreamingLoader(KeyedBatches):
    """``StreamingDataLoader`` over a ``StreamingDataset``, shuffled, no cache limit.

    Args:
        decode: Whether each payload is turned into pixels where the library's documentation does that.
    """

    is_cached = True

    def prepare(self, task: Task) -> None:
        """Import; the library takes endpoint and credentials from the environment."""
        origin = task.origin()
        os.environ |= {
            "S3_ENDPOINT_URL": origin.endpoint_url,
            "AWS_ACCESS_KEY_ID": origin.key,
            "AWS_SECRET_ACCESS_KEY": origin.secret,
            "AWS_DEFAULT_REGION": origin.region,
        }
        import streaming

        # Names in shared memory are global: what a killed run left would be taken for this one's.
        streaming.base.util.clean_stale_shared_memory()
        self._workers = task.num_workers

    def open(self, task: Task, clock: PhaseClock) -> Iterable[Any]:
        """Make data set and loader."""
        from streaming import StreamingDataLoader, StreamingDataset

        kind = StreamingDataset
        if self._decode:
            from benchmarks.peers.decoding import decoded_sample

            class Decoding(StreamingDataset):
                def __getitem__(self, at: Any) -> Any:
                    return decoded_sample(super().__getitem__(at))

            kind = Decoding
        origin = task.origin()
        dataset = kind(
            remote=f"s3://{origin.bucket}/{origin.prefix.rstrip('/')}",
            local=str(Path(task.folder, "cache")),
            shuffle=True,
            batch_size=task.batch_size,
        )
        # Workers are forked and inherit the client with its open connection: without TLS, which would notice, two of
        # them on one connection can take each other's answers, and shards come out torn. So each makes its own.
        for stream in dataset.streams:
            stream._downloader.clean_up()
        clock.mark(OPENED)
        loader: Iterable[Any] = StreamingDataLoader(
            dataset,
            batch_size=task.batch_size,
            num_workers=task.num_workers,
            persistent_workers=task.num_workers > 0,
        )
        return loader

    @property
    def configuration(self) -> dict[str, Any]:
        """How it was set up."""
        return {
            "loader": "StreamingDataLoader(StreamingDataset(shuffle=True)), MDS shards of 64 MiB, no compression",
            "cache": "local=, no limit",
            "store": "its client dropped before workers are forked, since they would share one connection",
            "workers": f"{self._workers}, persistent",
        }


def write(source: Path, target: Path) -> None:
    """Write the samples of the tars in ``source`` as MDS shards."""
    from streaming import MDSWriter

    with MDSWriter(out=str(target), columns={"key": "str", "bin": "bytes"}, size_limit=SHARD_BYTES) as writer:
        for path in sorted(source.glob("*.tar")):
            with path.open("rb") as file:
                for key, payload in tar_samples(file):
                    writer.write({"key": key, "bin": payload})


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
