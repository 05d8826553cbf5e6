"""fsspec's ``filecache`` over s3fs: whole files to a local folder, then read from there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import OPENED
from benchmarks.peers.keyed_batches import KeyedBatches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.meter import PhaseClock


class FsspecLoader(KeyedBatches):
    """torch's loader over tars opened by ``fsspec.open("filecache::s3://…")``."""

    is_cached = True

    def prepare(self, task: Task) -> None:
        """Import."""
        import fsspec
        import s3fs

        self._workers = task.num_workers
        _ = fsspec.open, s3fs.S3FileSystem

    def open(self, task: Task, clock: PhaseClock) -> Iterable[Any]:
        """Make data set and loader."""
        from torch.utils.data import DataLoader

        from benchmarks.peers.split_iterable import SplitTars

        origin = task.origin()
        opener = partial(
            _open,
            cache=str(Path(task.folder, "cache")),
            s3=origin.storage_options,
        )
        dataset = SplitTars([f"s3://{origin.bucket}/{origin.prefix}{name}" for name in task.shard_names], opener)
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
            "loader": "DataLoader over fsspec.open('filecache::s3://…') and tarfile, not shuffled",
            "cache": "filecache, whole files, no check of age",
            "workers": f"{self._workers}, persistent",
        }


def _open(url: str, *, cache: str, s3: dict[str, Any]) -> Any:
    import fsspec

    return fsspec.open(f"filecache::{url}", mode="rb", filecache={"cache_storage": cache}, s3=s3)
