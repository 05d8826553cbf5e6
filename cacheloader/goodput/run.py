"""``Run``: the context in which a training script trains, and whose events make the goodput account."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cacheloader import world
from cacheloader.goodput import recorder as recording
from cacheloader.goodput.archive import TIMEOUT_S, Archive
from cacheloader.goodput.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

    from cacheloader.goodput.hooks import Hook
    from cacheloader.goodput.meter import Meter


class Run:
    """Records what the training loop does, on every rank, into one folder for the whole life of a run.

    ::

        with cl.goodput.Run("runs/7") as run:
            for batch in loader:        # each batch of a cl.DataLoader is one step
                ...
            with run.eval():
                ...

    A step ends when the loop asks for the next batch. Where it is not one batch a step (gradient accumulation), or
    to tell tokens, call ``run.step()`` at the end of each and pass ``every_batch=False``.

    Args:
        folder: The run's folder: the same for all ranks, nodes and attempts, or one a node, gathered afterwards.
        every_batch: Whether each batch is a step.
        tokens_per_batch: Tokens of one batch of this rank, where every batch has as many.
        rank: This process; with ``world_size``, as in ``RemoteDataset``.
        world_size: Ranks.
        attempt: Name of this launch, the same on all ranks; else agreed on by itself, see ``world.attempt_name``.
        launcher: Who started this launch; equal for launches that restart each other, so that the time between them
            is a restart and no gap. Taken from torchrun and Slurm.
        n_devices: Devices that are paid for, if that is not one for each rank of the attempt under way.
        measure: Whether collectives and the device's idle time are measured, where torch is in use.
        meter: What measures them; by default a ``measuring.Meter``.
        hooks: Other places to send numbers to, on rank 0: ``goodput.hooks``.
        archive: URL (fsspec) to which a process beside each rank copies its event files: full ones while it trains, the
            last ones at its end, or when it was killed. ``cacheloader goodput URL`` reads them.
        storage_options: What fsspec's file system of ``archive`` takes, plain values.
        archive_timeout_s: How long the end of the run may wait for the last copies.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_batch: bool = True,
        tokens_per_batch: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        attempt: str | None = None,
        launcher: str | None = None,
        n_devices: int = 0,
        measure: bool = True,
        meter: Meter | None = None,
        hooks: Iterable[Hook] = (),
        archive: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        archive_timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.folder = Path(folder)
        self.every_batch = every_batch
        self._tokens_per_batch = tokens_per_batch
        self._place = (rank, world_size)
        self._attempt = attempt
        self._launcher = _launcher() if launcher is None else launcher
        self._n_devices = n_devices
        self._meter = meter
        self._measures = measure
        self._hooks = tuple(hooks)
        self._archive_options = (archive, storage_options or {}, archive_timeout_s)
        self._archive: Archive | None = None
        self.last_step = 0
        """The step that was completed last."""
        self.is_saving = False
        """Whether the training thread is saving a checkpoint."""
        self._loader: Any = None
        self._watch: Any = None
        self._committed = -1
        self._waiting_tokens: deque[tuple[int, int]] = deque(maxlen=1_000_000)
        self._depth = 0
        self._fetched_samples = 0
        self._fetch_s = 0.0
        self._epoch = -1
        self._source = ""
        self._begin_ns = -1

    def __enter__(self) -> Self:
        rank, world_size = self._place
        here = world.detect(rank=rank, world_size=world_size)
        attempt = self._attempt or world.attempt_name(here)
        is_first = all(path.name.startswith(f"events-{attempt}-") for path in self.folder.glob("events-*.jsonl"))
        self.recorder = Recorder(
            self.folder, attempt=attempt, rank=here.rank, world_size=here.world_size, sealed=self._sealed
        )
        self._start_archive()
        if here.rank == 0 and is_first:
            self.recorder.emit("run.start", n_devices=self._n_devices)
        self.recorder.emit("attempt.start", launcher=self._launcher, process_start_ns=_process_start_ns())
        restored = recording.enter(self)
        if restored is not None:
            self.last_step = restored
        if self._meter is None and self._measures:
            self._meter = _meter(here.world_size)
        if self._meter is not None:
            self._meter.start()
        if here.rank:
            self._hooks = ()
        if self._hooks:
            self._start_hooks()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recording.leave(self)
        if kind is None or (issubclass(kind, SystemExit) and not getattr(error, "code", None)):
            cause, code = "done", 0
            self._close_step()
        else:  # the step under way is none: it was not completed
            cause, code = f"{kind.__name__}: {error}"[:500], 1
        if self._meter is not None:
            self._meter.stop(self.recorder)
        self.recorder.emit("attempt.end", cause=cause, code=code)
        if cause == "done" and self.recorder.rank == 0:
            self.recorder.emit("run.end", reason=cause)
        if self._watch is not None:
            self._watch.end()
        self.recorder.close()
        for hook in self._hooks:
            hook.finish()
        if self._archive is not None:
            self._archive.close()

    @property
    def meter(self) -> Any:
        """What measures inside steps, ``None`` if nothing does; ``meter.watch(model)`` adds those of a DDP model."""
        return self._meter

    @property
    def is_paused(self) -> bool:
        """Whether this is a phase or a save, and no part of a training step."""
        return self._depth > 0 or self.is_saving

    def step(self, *, step: int | None = None, tokens: int = 0, samples: int = 0) -> None:
        """The step under way is complete.

        Args:
            step: Its number, from 1; one more than the last, if not given.
            tokens: Tokens that this rank trained on in it.
            samples: Samples likewise; what the loader handed out, if not given.
        """
        if step is not None:
            self.last_step = step - 1
        if self._begin_ns < 0:
            self._begin_ns = time.monotonic_ns()
        self._close_step(tokens, samples)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the time that is no training: ``"init"``, ``"ckpt_read"``, ``"warmup"`` or any other name."""
        self.recorder.emit("phase.begin", phase=name)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.recorder.emit("phase.end", phase=name)

    def eval(self) -> Any:
        """A context for an evaluation."""
        return self.phase("eval")

    def rollback(self, to_step: int, reason: str) -> None:
        """Give up what was done behind ``to_step``, for instance after a loss spike: it counts as lost work."""
        self._close_step()
        self.recorder.emit("rollback", from_step=self.last_step, to_step=to_step, reason=reason)
        self.last_step = to_step

    def resume_behind(self, step: int) -> None:
        """The next step is ``step + 1``; ``recorder.restore`` calls this."""
        self._close_step()
        self.last_step = step

    def membership(self, n_devices: int) -> None:
        """So many devices are paid for from here on, whether or not a rank runs on each."""
        self.recorder.emit("membership", n_devices=n_devices)

    def timed(self, batches: Iterable[Any], *, tokens: int = 0, samples: int = 0) -> Iterator[Any]:
        """The same batches, each one step, for loaders that are not a ``cl.DataLoader``; wrap the outermost iterator.

        Args:
            batches: What the loop would iterate over.
            tokens: Tokens in each.
            samples: Samples in each.
        """
        source = iter(batches)
        while True:
            self.fetching(source)
            begin = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                self.exhausted(source)
                return
            self.fetched(source, time.perf_counter() - begin, samples)
            self._tokens_per_batch = tokens
            yield batch

    def fetching(self, loader: Any) -> None:
        """The loop asks ``loader`` for a batch; the first loader that is asked outside of phases is the run's."""
        if self._depth or (self._loader is not None and self._loader is not loader):
            return
        if self.every_batch:
            self._close_step()
        if self._begin_ns < 0:
            self._begin_ns = time.monotonic_ns()
            if self._meter is not None:
                self._meter.fetching()
        if self._loader is not loader:
            self._loader = loader
            asked_s = time.perf_counter()
            self._ask_for_watch(loader)
            self._fetch_s += time.perf_counter() - asked_s  # the loop waits for that inside next(loader), too

    def fetched(self, loader: Any, fetch_s: float, num_samples: int, *, epoch: int = -1, source: str = "") -> None:
        """``loader`` handed out a batch after ``fetch_s``."""
        if self._depth or self._loader is not loader:
            return
        self._fetch_s += fetch_s
        self._fetched_samples += num_samples
        self._epoch = epoch
        if source:
            self._source = source
        if self._meter is not None:
            self._meter.fetched()

    def exhausted(self, loader: Any) -> None:
        """``loader`` has no more batches; what was waited for belongs to no step."""
        if self._loader is loader and not self._depth:
            self._loader, self._begin_ns, self._fetch_s = None, -1, 0.0

    def committed(self, step: int) -> None:
        """Steps up to ``step`` are safe; ``recorder.ckpt_commit`` calls this, in any thread."""
        self._committed = max(self._committed, step)

    def _start_archive(self) -> None:
        url, options, timeout_s = self._archive_options
        if url is not None:
            to = self.recorder
            self._archive = Archive(
                url, storage_options=options, folder=self.folder, attempt=to.attempt, rank=to.rank,
                world_size=to.world_size, timeout_s=timeout_s,
            )  # fmt: skip

    def _sealed(self, name: str) -> None:
        if self._archive is not None:
            self._archive.sealed(name)

    def _start_hooks(self) -> None:
        from cacheloader.goodput.export.batched import Started

        started = Started(
            run=self.recorder.run,
            attempt=self.recorder.attempt,
            step=self.last_step,
            run_start_s=_run_start_s(self.folder),
            folder=self.folder,
        )
        for hook in self._hooks:
            hook.start(started)

    def _ask_for_watch(self, loader: Any) -> None:
        """Have the daemon of the first loader that knows one watch this rank."""
        ask = getattr(loader, "watch_run", None)
        if self._watch is None and ask is not None:
            to = self.recorder
            self._watch = ask(to.watch_path, run=to.run, attempt=to.attempt, rank=to.rank, world=to.world_size)

    def _beat(self, dur_s: float, exposed_s: float, tokens: int) -> None:
        self._waiting_tokens.append((self.last_step, tokens))
        kept = 0
        while self._waiting_tokens and self._waiting_tokens[0][0] <= self._committed:
            kept += self._waiting_tokens.popleft()[1]
        self._watch.beat(
            self.last_step, dur_s=dur_s, exposed_s=exposed_s, tokens=tokens, kept_tokens=kept, committed=self._committed
        )

    def _close_step(self, tokens: int = 0, samples: int = 0) -> None:
        begin_ns, self._begin_ns = self._begin_ns, -1
        if begin_ns < 0:
            return
        now_ns = time.monotonic_ns()
        self.last_step += 1
        fetch_s, self._fetch_s = self._fetch_s, 0.0
        samples = samples or self._fetched_samples
        self._fetched_samples = 0
        tokens = tokens or self._tokens_per_batch
        fields = f',"step":{self.last_step},"dur_s":{(now_ns - begin_ns) / 1e9:.9f},"fetch_s":{fetch_s:.9f}'
        if tokens:
            fields += f',"tokens":{tokens}'
        if samples:
            fields += f',"samples":{samples}'
        if self._epoch >= 0:
            fields += f',"epoch":{self._epoch}'
        if self._source:
            fields += f',"source":{json.dumps(self._source)}'
            self._source = ""
        if self._meter is not None:
            fields += self._meter.step_fields(self.recorder, self.last_step, now_ns)
        self.recorder.write("step", fields, (time.time_ns(), now_ns))
        if self._watch is not None:
            self._beat((now_ns - begin_ns) / 1e9, fetch_s, tokens)
        for hook in self._hooks:
            hook.step(self.last_step, (now_ns - begin_ns) / 1e9, fetch_s, tokens, samples)


def _run_start_s(folder: Path) -> float:
    """When the run's first attempt began, since 1970."""
    found = [time.time()]
    for path in folder.glob("events-*-r00000.jsonl"):
        with path.open("rb") as file, suppress(ValueError, KeyError, TypeError):
            found.append(json.loads(file.readline())["wall_ns"] / 1e9)
    return min(found)


def _meter(world_size: int) -> Meter | None:
    """What measures inside steps, if this process uses torch and there is something to measure."""
    torch = sys.modules.get("torch")
    if torch is None or (world_size == 1 and not torch.cuda.is_initialized()):
        return None
    from cacheloader.goodput.measuring import Meter

    return Meter()


def _launcher() -> str:
    """Slurm's job and torchrun's agent, as far as there are any."""
    parts = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")]
    return "/".join(parts) if any(parts) else os.environ.get("MASTER_PORT", "")


def _process_start_ns() -> int:
    """When this process started, on the wall clock; 0 where /proc does not say."""
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        return time.time_ns() - age_ns
    return 0
