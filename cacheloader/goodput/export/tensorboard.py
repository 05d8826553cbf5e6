"""TensorBoard: curves by step that a resume cuts off where it goes on, and the account by wall time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cacheloader.goodput.export.batched import Batched

if TYPE_CHECKING:
    from pathlib import Path

    from cacheloader.goodput.export.batched import Row


class TensorBoard(Batched):
    """Writes event files for TensorBoard.

    Args:
        folder: Where to.
        every: Steps for one point.
    """

    def __init__(self, folder: str | Path, *, every: int = 20) -> None:
        super().__init__(every=every)
        self._folder = str(folder)

    def open(self) -> None:
        """Begin; points behind the resumed step are purged, since they will be drawn again."""
        from torch.utils.tensorboard import SummaryWriter

        purge = self.started.step + 1 if self.started.step else None
        self._writer: Any = SummaryWriter(self._folder, purge_step=purge)

    def send(self, row: Row) -> None:
        """One point a curve."""
        for name, value in row.named().items():
            self._writer.add_scalar(name, value, global_step=row.step, walltime=row.wall_s)

    def summary(self, numbers: dict[str, float]) -> None:
        """The account, over the seconds of the run: those only rise."""
        import time

        second = int(time.time() - self.started.run_start_s)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=second)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
