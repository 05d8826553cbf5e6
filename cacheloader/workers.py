"""What became of a loader's worker process that is no more."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from cacheloader.errors import WorkerLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.positioned import PositionedDataset

_LIKELY = {
    signal.SIGKILL: "most often the machine or its container ran out of memory: use fewer workers or a smaller "
    "prefetch_factor, and look into the kernel's log",
    signal.SIGBUS: "most often /dev/shm is full: enlarge it (docker run --shm-size) or use fewer workers",
    signal.SIGSEGV: "native code in the transform or a library crashed: run with num_workers=0 under faulthandler",
}


def lost_worker(
    error: RuntimeError, iterator: Any, dataset: PositionedDataset, *, epoch: int, row: int, num_taken: int
) -> WorkerLost | None:
    """What torch's error about a dead worker means; ``None`` if it is about something else.

    Args:
        error: What ``next`` raised.
        iterator: torch's iterator, which knows its workers.
        dataset: What they read.
        epoch: The epoch of the iteration.
        row: Where it started.
        num_taken: Batches of it that were handed out.
    """
    if not str(error).startswith("DataLoader worker (pid"):
        return None
    workers = getattr(iterator, "_workers", ())
    dead = [(number, worker) for number, worker in enumerate(workers) if worker.exitcode not in (None, 0)]
    if not dead:
        return None
    number, worker = dead[0]
    # Worker w prepares every batch k with k mod W = w; the first of those that was not handed out is the one at issue.
    batch = num_taken + (number - num_taken) % len(workers)
    row += batch * dataset.rows_per_step()
    try:
        shards = dataset.shards_at(epoch=epoch, row=row)
    except IndexError:
        shards = []  # it had delivered all its batches
    at = f" before it delivered the batch at row {row} of epoch {epoch}" if shards else ""
    read_from = f" from {', '.join(shards[:3])}{' and others' if len(shards) > 3 else ''}" if shards else ""
    return WorkerLost(
        f"worker {number} of {len(workers)} (pid {worker.pid}) {_end(worker.exitcode)}{at}{read_from}; "
        f"{_advice(worker.exitcode)}",
        uri=shards[0] if len(shards) == 1 else "",
    )


def _end(exit_code: int) -> str:
    if exit_code > 0:
        return f"exited with status {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"


def _advice(exit_code: int) -> str:
    if exit_code > 0:
        return "the transform or a library in it ended the process: see what it printed"
    return _LIKELY.get(signal.Signals(-exit_code), "find out who sent the signal") if -exit_code < 32 else ""


def leave_sigterm_to_training(then: Callable[[int], None] | None, worker_id: int) -> None:
    """In a worker, before its first batch: where the training process handles SIGTERM itself, outlive the first one.

    Batch systems and torchrun signal all processes of a job at once. A worker that ended would end the training loop
    with it, wherever it is, before it could save.

    Args:
        then: The user's ``worker_init_fn``.
        worker_id: Of this worker.
    """
    if callable(signal.getsignal(signal.SIGTERM)):  # inherited by fork, and not called: torch's own is in its place
        signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if then is not None:
        then(worker_id)
