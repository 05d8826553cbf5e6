"""torch alone over a mounted folder: what most people write first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import OPENED
from benchmarks.peers.keyed_batches import KeyedBatches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.meter import PhaseClock

FILES = "files"


class StockLoader(KeyedBatches):
    """torch's loader over a folder.

    Args:
        of: ``"files"``: one file a sample below ``files/``, by a map-style data set, shuffled; ``"tars"``: the tars as
            streams, each worker its own.
    """

    # Its second epoch reads the mount once more.
    is_cached = True

    def __init__(self, *, of: str) -> None:
        if of not in ("files", "tars"):
            raise ValueError(f"of={of!r} is neither 'files' nor 'tars'")
        super().__init__()
        self._of = of

    def prepare(self, task: Task) -> None:
        """Import."""
        import torch.utils.data

        self._workers = task.num_workers
        _ = torch.utils.data.DataLoader

    def open(self, task: Task, clock: PhaseClock) -> Iterable[Any]:
        """List the folder and make the loader."""
        from torch.utils.data import DataLoader, Dataset

        from benchmarks.peers.split_iterable import SplitTars

        folder = Path(task.source_folder)
        dataset: Dataset[dict[str, Any]]
        if self._of == "files":
            paths = sorted(str(path) for path in (folder / FILES).iterdir())

            class Files(Dataset[dict[str, Any]]):
                def __len__(self) -> int:
                    return len(paths)

                def __getitem__(self, index: int) -> dict[str, Any]:
                    path = Path(paths[index])
                    return {"key": path.stem, "bin": path.read_bytes()}

            dataset = Files()
        else:
            dataset = SplitTars([str(folder / name) for name in task.shard_names], _open)
        clock.mark(OPENED)
        return DataLoader(
            dataset,
            batch_size=task.batch_size,
            shuffle=True if self._of == "files" else None,
            num_workers=task.num_workers,
            persistent_workers=task.num_workers > 0,
        )

    @property
    def configuration(self) -> dict[str, Any]:
        """How it was set up."""
        what = "one file a sample, shuffled" if self._of == "files" else "tars as streams, not shuffled"
        return {"loader": f"torch's DataLoader, {what}", "cache": "none", "workers": f"{self._workers}, persistent"}


def _open(path: str) -> Any:
    return Path(path).open("rb")
