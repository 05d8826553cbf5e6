"""fsspec's ``filecache`` over s3fs: whole files to a local folder, then read from there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import OPENED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.meter import PhaseClock


class FsspecLoader:
    """torch's loader over tars opened by ``fsspec.open("filecache::s3://…")``."""

    is_cached = True

    def __init__(self) -> None:
        self._workers = 0

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
            s3={
                "key": origin.key,
                "secret": origin.secret,
                "endpoint_url": origin.endpoint_url,
                "client_kwargs": {"region_name": origin.region},
            },
        )
        dataset = SplitTars([f"s3://{origin.bucket}/{origin.prefix}{name}" for name in task.shard_names], opener)
        clock.mark(OPENED)
        return DataLoader(
            dataset,
            batch_size=task.batch_size,
            num_workers=task.num_workers,
            persistent_workers=task.num_workers > 0,
        )

    def count(self, batch: Any) -> tuple[int, int]:
        """Samples and payload bytes."""
        payloads = batch["bin"]
        return len(payloads), sum(map(len, payloads))

    def items(self, batch: Any) -> Iterator[tuple[str, bytes]]:
        """Key and payload of each sample."""
        return zip(batch["key"], batch["bin"], strict=True)

    def close(self) -> None:
        """Nothing was started that outlives the process."""

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
