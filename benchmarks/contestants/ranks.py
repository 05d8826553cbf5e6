"""Several ranks on one node, each a process with workers of its own: one cold epoch, then a warm one."""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import queue
import socket
import time
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.harness.child import failure_of
from benchmarks.harness.measurement import Failure

if TYPE_CHECKING:
    from benchmarks.harness.contestant import Loader, Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter

_TIMEOUT_S = 100.0


_LOOK_S = 1.0


class Ranks:
    """Drives one loader in each rank.

    Args:
        loader: ``"module:callable"`` that makes it; it learns its rank from ``RANK`` and ``WORLD_SIZE``.
        ranks: How many.
        options: Keyword arguments of the loader.
        timeout_s: Of an epoch; below the runner's own limit, so that the message tells how the ranks stand.
    """

    is_one_job = True
    """Whether they share an epoch, each its part of it."""

    def __init__(
        self, *, loader: str, ranks: int, options: dict[str, Any] | None = None, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._timeout_s = timeout_s
        self._name = loader
        self._ranks = ranks
        self._options = options or {}

    def options_of(self, rank: int) -> dict[str, Any]:  # noqa: ARG002  (others have some of their own)
        """Keyword arguments of that rank's loader."""
        return self._options

    def prepare(self, task: Task) -> None:
        """Start the ranks and let each import; they wait for the first phase."""
        spawn = multiprocessing.get_context("spawn")
        self._said: Any = spawn.Queue()
        self._go = [spawn.Queue() for _ in range(self._ranks)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = [
            spawn.Process(
                target=_told,
                args=(
                    rank,
                    self._ranks,
                    port if self.is_one_job else 0,
                    self._name,
                    self.options_of(rank),
                    task,
                    self._go[rank],
                    self._said,
                ),
            )
            for rank in range(self._ranks)
        ]
        for process in self._processes:
            process.start()
        self._answers()

    def run(self, task: Task, meter: Meter) -> Measurement:
        """Cold, warm, verified."""
        for name, cache in (
            ("cold", "empty cache; the store's files in memory"),
            ("warm", "cached files in memory, as the epoch before left them"),
        ):
            with meter.phase(name, page_cache=cache) as clock:
                self._tell("epoch")
                for samples, size_bytes in self._answers():
                    clock.add(samples=samples, size_bytes=size_bytes)
                clock.end_epoch(passes=1 if self.is_one_job else self._ranks)
        self._tell("items")
        answers = self._answers()
        together = [items for items, _ in answers]
        for one in [itertools.chain(*together)] if self.is_one_job else together:
            meter.verify(one)
        self._tell("end")
        configuration: dict[str, Any] = answers[0][1]
        for process in self._processes:
            process.join(_TIMEOUT_S)
        return meter.measurement(configuration | {"ranks": self._ranks, "workers of each": task.num_workers})

    def _tell(self, what: str) -> None:
        for go in self._go:
            go.put(what)

    def _answers(self) -> list[Any]:
        found: list[Any] = []
        deadline = time.monotonic() + self._timeout_s
        while len(found) < self._ranks:
            try:
                answer = self._said.get(timeout=_LOOK_S)
            except queue.Empty:
                states = [process.exitcode for process in self._processes]
                if any(states):
                    raise RuntimeError(f"a rank ended; exit codes: {states}") from None
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"a rank said nothing for {self._timeout_s:.0f} s; exit codes: {states}"
                    ) from None
                continue
            if isinstance(answer, Failure):
                raise RuntimeError(f"a rank failed: {answer}")  # noqa: TRY004  (its news, not its type)
            found.append(answer)
        return found


class Jobs(Ranks):
    """The same with jobs that know nothing of each other, each of which reads the whole data set.

    Args:
        loader: ``"module:callable"`` that makes it.
        ranks: How many.
        options: Keyword arguments of the loader.
        is_seeded: Whether it takes a ``seed``, so that no job reads in another's order.
    """

    is_one_job = False

    def __init__(
        self, *, loader: str, ranks: int, options: dict[str, Any] | None = None, is_seeded: bool = False
    ) -> None:
        super().__init__(loader=loader, ranks=ranks, options=options)
        self._is_seeded = is_seeded

    def options_of(self, rank: int) -> dict[str, Any]:
        """Each its own seed."""
        return self._options | ({"seed": 17 + rank} if self._is_seeded else {})


def _told(rank: int, ranks: int, port: int, name: str, options: dict[str, Any], task: Task, go: Any, said: Any) -> None:
    try:
        _rank(rank, ranks, port, name, options, task, go, said)
    except Exception as error:
        traceback.print_exc()
        said.put(failure_of(error))
        raise


def _rank(rank: int, ranks: int, port: int, name: str, options: dict[str, Any], task: Task, go: Any, said: Any) -> None:
    from benchmarks.harness.meter import PhaseClock

    # This process was spawned, and would hand that down to the loaders' workers; under torchrun they begin as the
    # platform has it.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    if port:
        # As torchrun and the training script do it; some peers look at the one, some at the other.
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        import torch.distributed

        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=10 * _TIMEOUT_S))
    module, _, attribute = name.partition(":")
    loader: Loader = getattr(import_module(module), attribute)(**options)
    loader.prepare(task)
    said.put(None)
    batches = None
    while (what := go.get(timeout=10 * _TIMEOUT_S)) != "end":
        if batches is None:
            batches = loader.open(task, PhaseClock())
        if what == "epoch":
            counts = [loader.count(batch) for batch in batches]
            said.put((sum(samples for samples, _ in counts), sum(size_bytes for _, size_bytes in counts)))
        else:
            items = [(key, bytes(payload)) for batch in batches for key, payload in loader.items(batch)]
            said.put((items, loader.configuration))
    loader.close()
