"""MLflow: one batch of metrics for several steps, each with its step and time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from cacheloader.goodput.export.batched import Batched

if TYPE_CHECKING:
    from cacheloader.goodput.export.batched import Row


class MLflow(Batched):
    """Logs to an MLflow run.

    Args:
        run_id: Which; else the active one, else a new one.
        tracking_uri: Which server; else MLflow's own choice.
        every: Steps for one batch.
    """

    def __init__(self, *, run_id: str | None = None, tracking_uri: str | None = None, every: int = 20) -> None:
        super().__init__(every=every)
        self._run_id = run_id
        self._uri = tracking_uri

    def open(self) -> None:
        """Find the run."""
        import mlflow

        self._client: Any = mlflow.MlflowClient(tracking_uri=self._uri)
        if self._run_id is None:
            active = mlflow.active_run()
            if active is not None:
                self._run_id = active.info.run_id
            else:
                self._run_id = self._client.create_run("0", run_name=self.started.run).info.run_id

    @property
    def run_id(self) -> str | None:
        """The run that is logged to."""
        return self._run_id

    def send(self, row: Row) -> None:
        """One call for all metrics; MLflow would take step 0 for every one that names none."""
        self._log(row.named(), step=row.step, wall_s=row.wall_s)

    def summary(self, numbers: dict[str, float]) -> None:
        """The account."""
        now_s = time.time()
        self._log(numbers, step=int(now_s - self.started.run_start_s), wall_s=now_s)

    def close(self) -> None:
        """The run belongs to the caller."""

    def _log(self, numbers: dict[str, float], *, step: int, wall_s: float) -> None:
        from mlflow.entities import Metric

        stamp_ms = int(wall_s * 1000)
        metrics = [Metric(name, value, stamp_ms, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
