"""A run's numbers in the loggers that people have already; each is imported only where it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheloader.goodput.export.mlflow import MLflow as MLflow
    from cacheloader.goodput.export.opentelemetry import OpenTelemetry as OpenTelemetry
    from cacheloader.goodput.export.tensorboard import TensorBoard as TensorBoard
    from cacheloader.goodput.export.wandb import WandB as WandB

_ROOMS = {"MLflow": "mlflow", "OpenTelemetry": "opentelemetry", "TensorBoard": "tensorboard", "WandB": "wandb"}

__all__ = ["MLflow", "OpenTelemetry", "TensorBoard", "WandB"]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(import_module(f"cacheloader.goodput.export.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
