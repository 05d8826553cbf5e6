"""s3torchconnector: AWS's own reader (CRT), one object a tar, streamed each epoch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import OPENED
from benchmarks.peers.keyed_batches import KeyedBatches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.meter import PhaseClock


class ConnectorLoader(KeyedBatches):
    """torch's loader over ``S3IterableDataset`` with sharding on, each object read as a stream of tar members."""

    is_cached = False

    def prepare(self, task: Task) -> None:
        """Import; credentials come from the environment."""
        origin = task.origin()
        os.environ |= {"AWS_ACCESS_KEY_ID": origin.key, "AWS_SECRET_ACCESS_KEY": origin.secret}
        import s3torchconnector

        self._workers = task.num_workers
        _ = s3torchconnector.S3IterableDataset

    def open(self, task: Task, clock: PhaseClock) -> Iterable[Any]:
        """Make data set and loader."""
        from s3torchconnector import S3ClientConfig, S3IterableDataset
        from torch.utils.data import DataLoader, IterableDataset

        from benchmarks.peers.tar_samples import tar_samples

        origin = task.origin()
        objects = S3IterableDataset.from_objects(
            [f"s3://{origin.bucket}/{origin.prefix}{name}" for name in task.shard_names],
            region=origin.region,
            endpoint=origin.endpoint_url,
            s3client_config=S3ClientConfig(force_path_style=True),
            enable_sharding=True,
        )

        class Samples(IterableDataset[dict[str, Any]]):
            def __iter__(self) -> Iterator[dict[str, Any]]:
                for reader in objects:
                    for key, payload in tar_samples(reader):
                        yield {"key": key, "bin": payload}

        dataset = Samples()
        clock.mark(OPENED)
        return DataLoader(
            dataset,
            batch_size=task.batch_size,
            num_workers=task.num_workers,
            persistent_workers=task.num_workers > 0,
        )

    @property
    def configuration(self) -> dict[str, Any]:
        """How it was set up."""
        return {
            "loader": "DataLoader over S3IterableDataset(enable_sharding=True), whole-object reader, tarfile",
            "cache": "none",
            "workers": f"{self._workers}, persistent",
        }
