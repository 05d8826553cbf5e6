"""Saves of one training state: how long the training thread stands still, and how long until the save is complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter

PAGE_CACHE = "writes are synced to disk"
SEED = 17


def weights(num_parameters: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The model's parameters; a checkpoint has to bring them back to the last bit."""
    return np.random.default_rng(SEED).standard_normal(num_parameters, dtype=np.float32)


class Saving:
    """A model of one tensor and its Adam state, three times its size, saved again and again.

    The first save is a phase of its own: it makes the memory that later ones reuse.

    Args:
        how: ``"sync"``, ``"thread"`` or ``"process"`` of ``cl.Checkpointer``; ``"dcp.save"`` or ``"dcp.async_save"``.
        num_parameters: Floats in the model.
        passes: Saves in the second phase.
    """

    def __init__(self, *, how: str, num_parameters: int, passes: int) -> None:
        self._how = how
        self._num_parameters = num_parameters
        self._passes = passes

    def prepare(self, task: Task) -> None:
        """Import, make the state, and the process group that a save by another process needs."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        import cacheloader as cl

        self._torch, self._dcp, self._cl, self._get_state_dict = torch, dcp, cl, get_state_dict
        self._folder = Path(task.folder)
        store = dist.FileStore(str(self._folder / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._model, self._optimizer = self._job(weights(self._num_parameters))
        self._model.weight.grad = torch.zeros_like(self._model.weight)
        self._optimizer.step()

    def _job(self, values: Any) -> tuple[Any, Any]:
        torch = self._torch
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.from_numpy(values.copy()))
        return model, torch.optim.Adam(model.parameters(), lr=0.0)

    def run(self, task: Task, meter: Meter) -> Measurement:  # noqa: ARG002
        """The first save, then some more; each is waited for behind the clock of its stall."""
        ours = not self._how.startswith("dcp")
        save, wait = self._ours() if ours else self._torchs()
        size_bytes = self._num_parameters * 4
        for phase, steps in (("first save", [1]), ("saves", range(2, 2 + self._passes))):
            with meter.phase(phase, page_cache=PAGE_CACHE) as clock:
                for step in steps:
                    clock.take(map(save, [step]), lambda _: (1, size_bytes), step=wait)
        meter.verify([("weight", self._restored(ours))])
        return meter.measurement({"how": self._how, "state_bytes": 3 * size_bytes})

    def _ours(self) -> tuple[Callable[[int], None], Callable[[], None]]:
        checkpoints = self._checkpointer(self._model, self._optimizer, keep_last=1, mode=self._how)
        return checkpoints.save, checkpoints.wait

    def _checkpointer(self, model: Any, optimizer: Any, **options: Any) -> Any:
        return self._cl.Checkpointer(self._folder / "ckpt", model=model, optimizer=optimizer, **options)

    def _torchs(self) -> tuple[Callable[[int], None], Callable[[], None]]:
        pending: list[Any] = []

        def save(step: int) -> None:
            model, optimizer = self._get_state_dict(self._model, self._optimizer)
            state = {"model": model, "optimizer": optimizer}
            place = self._folder / f"dcp-{step}"
            if self._how == "dcp.save":
                self._dcp.save(state, checkpoint_id=place)
            else:
                pending.append(self._dcp.async_save(state, checkpoint_id=place))

        def wait() -> None:
            if pending:
                pending.pop().result()
            for old in sorted(self._folder.glob("dcp-*"), key=lambda path: path.stat().st_mtime)[:-1]:
                shutil.rmtree(old)

        return save, wait

    def _restored(self, ours: bool) -> bytes:  # noqa: FBT001
        model, optimizer = self._job(np.zeros(self._num_parameters, dtype=np.float32))
        if ours:
            self._checkpointer(model, optimizer).restore_latest()
        else:
            state = {"model": {"weight": model.weight.data}}
            self._dcp.load(state, checkpoint_id=next(self._folder.glob("dcp-*")))
        return bytes(model.weight.detach().numpy().tobytes())
