"""megatron-energon: the same tars after ``energon prepare``, read through the multi-storage client with its cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import OPENED
from benchmarks.peers.keyed_batches import KeyedBatches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.meter import PhaseClock

PROFILE = "bench"


class EnergonLoader(KeyedBatches):
    """``get_loader`` over ``get_train_dataset(repeat=False)``; samples stay raw bytes."""

    is_cached = True

    def prepare(self, task: Task) -> None:
        """Configure storage, which the library takes from a file named by the environment; import."""
        origin = task.origin()
        # One a rank: in a cache that two ranks fill side by side, readers met torn tars.
        cache = f"{task.folder}/cache-{os.environ.get('RANK', '0')}"
        configuration = Path(task.folder, "msc.json")
        configuration.write_text(
            json.dumps(
                {
                    "profiles": {
                        PROFILE: {
                            "storage_provider": {
                                "type": "s3",
                                "options": {
                                    "base_path": "",
                                    "endpoint_url": origin.endpoint_url,
                                    "region_name": origin.region,
                                },
                            },
                            "credentials_provider": {
                                "type": "S3Credentials",
                                "options": {"access_key": origin.key, "secret_key": origin.secret},
                            },
                            "caching_enabled": True,
                        }
                    },
                    "cache": {"size": "20G", "location": cache, "check_source_version": False},
                }
            )
        )
        os.environ["MSC_CONFIG"] = str(configuration)
        import megatron.energon

        self._workers = task.num_workers
        _ = megatron.energon.get_train_dataset

    def open(self, task: Task, clock: PhaseClock) -> Iterable[Any]:
        """Make data set and loader."""
        from megatron.energon import (
            Cooker,
            DefaultTaskEncoder,
            WorkerConfig,
            basic_sample_keys,
            get_loader,
            get_train_dataset,
            stateless,
        )

        @stateless
        def cook(sample: dict[str, Any]) -> dict[str, Any]:
            return {**basic_sample_keys(sample), "bin": sample["bin"]}

        class Raw(DefaultTaskEncoder[Any, Any, Any, Any]):
            cookers = [Cooker(cook)]  # noqa: RUF012  (the library reads it from the class)
            decoder = None

            def batch(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
                return {"key": [sample["__key__"] for sample in samples], "bin": [sample["bin"] for sample in samples]}

        origin = task.origin()
        dataset = get_train_dataset(
            f"msc://{PROFILE}/{origin.bucket}/{origin.prefix.rstrip('/')}",
            worker_config=WorkerConfig(
                rank=int(os.environ.get("RANK", "0")),
                world_size=int(os.environ.get("WORLD_SIZE", "1")),
                num_workers=task.num_workers,
            ),
            batch_size=task.batch_size,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            task_encoder=Raw(),
            repeat=False,
        )
        clock.mark(OPENED)
        loader: Iterable[Any] = get_loader(dataset)
        return loader

    def items(self, batch: Any) -> Iterator[tuple[str, bytes]]:
        """Key and payload of each sample; its keys begin with the name of the shard."""
        return super().items({**batch, "key": [key.rpartition("/")[2] for key in batch["key"]]})

    @property
    def configuration(self) -> dict[str, Any]:
        """How it was set up."""
        return {
            "loader": "get_loader(get_train_dataset(repeat=False)), no shuffle buffer, no decoding",
            "cache": "multi-storage client, 20 GB, one a rank",
            "workers": str(self._workers),
        }


def write(source: Path, target: Path) -> None:
    """Copy the tars and prepare them."""
    target.mkdir()
    for path in source.glob("*.tar"):
        shutil.copy(path, target)
    command = [str(Path(sys.executable).with_name("energon")), "prepare", str(target), "--non-interactive"]
    command += ["--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--no-progress"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
