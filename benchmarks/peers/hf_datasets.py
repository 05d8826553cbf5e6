"""Hugging Face datasets in streaming mode, by its WebDataset builder over presigned URLs.

Its release 5.2 fails on ``s3://``: it hands ``block_size`` to s3fs, which refuses it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import OPENED
from benchmarks.peers.keyed_batches import KeyedBatches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.meter import PhaseClock


class DatasetsLoader(KeyedBatches):
    """torch's loader over ``load_dataset("webdataset", streaming=True)``."""

    is_cached = False

    def prepare(self, task: Task) -> None:
        """Import."""
        os.environ |= {
            "HF_HOME": f"{task.folder}/home",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        }
        import datasets

        self._workers = task.num_workers
        _ = datasets.load_dataset

    def open(self, task: Task, clock: PhaseClock) -> Iterable[Any]:
        """Make data set and loader."""
        from datasets import load_dataset
        from datasets.distributed import split_dataset_by_node
        from torch.utils.data import DataLoader

        dataset = load_dataset(
            "webdataset",
            data_files={"train": _presigned(task)},
            split="train",
            streaming=True,
        )
        if "RANK" in os.environ:
            dataset = split_dataset_by_node(
                dataset, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
            )
        clock.mark(OPENED)
        return DataLoader(
            dataset,
            batch_size=task.batch_size,
            num_workers=task.num_workers,
            persistent_workers=task.num_workers > 0,
            collate_fn=_columns,
        )

    @property
    def configuration(self) -> dict[str, Any]:
        """How it was set up."""
        return {
            "loader": "DataLoader over load_dataset('webdataset', streaming=True) over presigned URLs, not shuffled",
            "cache": "none (streaming)",
            "workers": f"{self._workers}, persistent",
        }


def _presigned(task: Task) -> list[str]:
    import botocore.session

    origin = task.origin()
    client = botocore.session.Session().create_client(
        "s3",
        region_name=origin.region,
        endpoint_url=origin.endpoint_url,
        aws_access_key_id=origin.key,
        aws_secret_access_key=origin.secret,
    )
    return [
        client.generate_presigned_url("get_object", Params={"Bucket": origin.bucket, "Key": origin.prefix + name})
        for name in task.shard_names
    ]


def _columns(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {"key": [sample["__key__"] for sample in samples], "bin": [sample["bin"] for sample in samples]}
