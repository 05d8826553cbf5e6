"""Numbers that arrive in the loggers of others; each test needs the real package and is skipped without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import cacheloader as cl
from cacheloader.goodput import recorder
from cacheloader.goodput.export import MLflow, OpenTelemetry, TensorBoard, WandB

if TYPE_CHECKING:
    from pathlib import Path

    from cacheloader.goodput.hooks import Hook


def attempt(folder: Path, hook: Hook, *, name: str, behind: int = 0, steps: int = 10) -> None:
    """An attempt of ``steps`` steps that resumes behind a step."""
    if behind:
        recorder.restore(f"step-{behind}", behind)
    with cl.goodput.Run(folder, rank=0, world_size=1, attempt=name, hooks=[hook]) as run:
        for _ in run.timed(range(steps), tokens=8):
            pass
        recorder.ckpt_commit("last", run.last_step)


def test_a_logger_that_fails_stops_itself_and_not_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TensorBoard):
        def open(self) -> None:
            raise OSError("no disk")

    attempt(tmp_path / "run", Broken(tmp_path), name="a")
    assert "Broken failed; this attempt goes on without it" in caplog.text


def test_only_rank_0_sends(tmp_path: Path) -> None:
    class Noting:
        def __init__(self) -> None:
            self.called: list[str] = []

        def start(self, started: object) -> None:
            self.called.append("start")

        def step(self, step: int, dur_s: float, fetch_s: float, tokens: int, samples: int) -> None:
            self.called.append("step")

        def finish(self) -> None:
            self.called.append("finish")

    hooks = [Noting(), Noting()]
    for rank in (0, 1):
        with cl.goodput.Run(tmp_path, rank=rank, world_size=2, attempt="a", hooks=[hooks[rank]]) as run:
            list(run.timed(range(3)))
    assert [hook.called for hook in hooks] == [["start", "step", "step", "step", "finish"], []]


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_draws_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name, behind in (("a", 0), ("b", 5)):
        attempt(tmp_path / "run", TensorBoard(tmp_path / "tb", every=1), name=name, behind=behind)
    read = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [point.step for point in read.Scalars("cacheloader/fetch_seconds_p50")] == list(range(1, 16))
    assert 0 < read.Scalars("goodput/ratio")[-1].value < 1


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_batches_with_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    uri = f"file://{tmp_path}/mlruns"
    client = mlflow.MlflowClient(tracking_uri=uri)
    run_id = client.create_run("0").info.run_id
    attempt(tmp_path / "run", MLflow(run_id=run_id, tracking_uri=uri, every=5), name="a")
    history = client.get_metric_history(run_id, "cacheloader/fetch_seconds_p50")
    assert [point.step for point in history] == [5, 10]
    assert all(point.timestamp > 10**12 for point in history)  # milliseconds
    assert 0 < client.get_run(run_id).data.metrics["goodput/ratio"] < 1


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_what_a_resume_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="p", mode="offline", dir=str(tmp_path))
    sent: list[dict[str, Any]] = []
    real = run.log
    monkeypatch.setattr(run, "log", lambda data, **options: (sent.append(data | options), real(data, **options)))
    for name, behind in (("a", 0), ("b", 5)):
        attempt(tmp_path / "run", WandB(run, every=5), name=name, behind=behind)
    rows = [row for row in sent if "training/step" in row]
    assert [row["training/step"] for row in rows] == [5, 10, 10, 15]
    hours = [row["goodput/wall_hours"] for row in sent]
    assert hours == sorted(hours)
    assert not any("step" in row for row in sent)
    assert run.summary["training/step"] == 15
    run.finish()


@pytest.mark.filterwarnings("ignore")
def test_opentelemetry_histograms_have_edges_in_seconds(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    attempt(tmp_path / "run", OpenTelemetry(provider), name="a")
    data = reader.get_metrics_data()
    assert data is not None
    found = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    (point,) = found["cacheloader.fetch.duration"].data.data_points
    assert found["cacheloader.fetch.duration"].unit == "s"
    assert point.count == 10
    assert point.explicit_bounds[0] == 0.001
    assert point.explicit_bounds[-1] == 60
    assert found["training.tokens"].data.data_points[0].value == 80
    assert 0 < found["training.goodput.ratio"].data.data_points[0].value < 1
    provider.shutdown()
