"""Measures inside a step, in plain PyTorch: collectives and the device's idle time.

The same code reads the host's clock, which is right where calls block (CPU, gloo), or events on the device's stream,
which are read a few steps later, so that nothing ever waits for the device. Nothing is sent between ranks: each writes
down how long its own collectives took, and the ledger compares.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from cacheloader.goodput import recorder as recording
from cacheloader.goodput.histogram import Durations

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.goodput.recorder import Recorder

NAMES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast",
    "reduce", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
)  # fmt: skip
"""Calls that are timed where the training thread waits in them; those with ``async_op`` return at once and are not."""

MAX_PER_STEP = 64
"""Collectives of one step that are told apart; what comes later is added to the last of them."""

STEPS_PER_SUMMARY = 64
MAX_LATE_STEPS = 32


class Clock(Protocol):
    """Marks moments and tells the time between two of them."""

    def mark(self) -> Any:
        """This moment."""
        ...

    def elapsed_s(self, begin: Any, end: Any) -> float | None:
        """Seconds between two marks; ``None``: not known yet, ask later."""
        ...


class HostClock:
    """The host's own clock."""

    def mark(self) -> int:
        """This moment."""
        return time.perf_counter_ns()

    def elapsed_s(self, begin: int, end: int) -> float:
        """Seconds between two marks."""
        return (end - begin) / 1e9


class CudaClock:
    """Events on the current stream: the moment at which the device comes by, not the one at which the host does."""

    def mark(self) -> Any:
        """A new event behind all work that was given to the device so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_s(self, begin: Any, end: Any) -> float | None:
        """Seconds between two events, ``None`` while the device has not come by the second."""
        return begin.elapsed_time(end) / 1e3 if end.query() else None


class Meter:
    """Times the collectives of the training thread and, on a device, how long it idled while the loop waited for data.

    Args:
        clock: Where the time is read; by default the device's events where CUDA is in use, else the host's clock.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or (CudaClock() if _uses_device() else HostClock())
        self._waits_for_device = not isinstance(self._clock, HostClock)
        self._originals: dict[str, Callable[..., Any]] = {}
        self._thread = 0
        self._inside = False
        self._spans: list[tuple[str, Any, Any]] = []
        self._fetch: tuple[Any, Any] | None = None
        self._fetch_begin: Any = None
        self._late: deque[tuple[int, int, tuple[Any, Any] | None, list[tuple[str, Any, Any]]]] = deque()
        self._uncounted: list[tuple[str, float, int]] = []
        """Name, seconds and step of what no histogram holds yet: counted many steps at once, it costs each less."""
        self._num_steps = 0

    def start(self) -> None:
        """Begin to time; the calls of ``torch.distributed`` are replaced by ones that do."""
        self._thread = threading.get_ident()
        if not dist.is_available():
            return
        for name in NAMES:
            original = getattr(dist, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(dist, name, self._timed(name, original))

    def watch(self, model: Any) -> None:
        """Time the reductions of a ``DistributedDataParallel`` model, which never pass through ``torch.distributed``.

        Of each backward pass the last bucket counts: all before it overlap with computing, and it is what the training
        thread waits for.
        """
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def hook(group: Any, bucket: Any) -> Any:
            begin = self._clock.mark()
            future = allreduce_hook(group, bucket)
            if not bucket.is_last() or not self._counts:
                return future

            def done(finished: Any) -> Any:
                self._spans.append(("ddp_all_reduce", begin, self._clock.mark()))
                return finished.value()

            return future.then(done)

        # torch compares the annotations with the classes themselves.
        hook.__annotations__ = {"bucket": vars(dist)["GradBucket"], "return": torch.futures.Future[torch.Tensor]}
        model.register_comm_hook(None, hook)

    def fetching(self) -> None:
        """The loop asks for a batch."""
        if self._waits_for_device:
            self._fetch_begin = self._clock.mark()

    def fetched(self) -> None:
        """The loop has it."""
        if self._waits_for_device and self._fetch_begin is not None:
            self._fetch = (self._fetch_begin, self._clock.mark())
            self._fetch_begin = None

    def step_fields(self, recorder: Recorder, step: int, mono_ns: int) -> str:
        """What to add to the step's event."""
        spans, self._spans = self._spans, []
        fetch, self._fetch = self._fetch, None
        self._num_steps += 1
        if self._num_steps % STEPS_PER_SUMMARY == 0:
            self._write_tails(recorder)
        if self._waits_for_device:
            self._late.append((mono_ns, step, fetch, spans))
            self._write_late(recorder)
            return ""
        if not spans:
            return ""
        durations = [self._measured(name, begin, end, step) or 0.0 for name, begin, end in spans]
        return f',"coll_us":{_joined(durations)}'

    def stop(self, recorder: Recorder) -> None:
        """Put the calls back and write what is left; waits for nothing that the device has not done."""
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals.clear()
        self._write_late(recorder)
        self._write_tails(recorder)

    @property
    def _counts(self) -> bool:
        """Whether what happens now is part of a training step."""
        run = recording.active()
        return run is not None and not run.is_paused

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        clock = self._clock

        @wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            if self._inside or options.get("async_op") or threading.get_ident() != self._thread or not self._counts:
                return original(*arguments, **options)
            self._inside = True  # some are made of others
            begin = clock.mark()
            try:
                return original(*arguments, **options)
            finally:
                self._inside = False
                self._spans.append((name, begin, clock.mark()))

        return call

    def _measured(self, name: str, begin: Any, end: Any, step: int) -> float | None:
        seconds = self._clock.elapsed_s(begin, end)
        if seconds is not None:
            self._uncounted.append((name, seconds, step))
        return seconds

    def _write_late(self, recorder: Recorder) -> None:
        """Steps that the device has passed by now, oldest first; those that it never tells are given up."""
        while self._late:
            mono_ns, step, fetch, spans = self._late[0]
            last = spans[-1][2] if spans else fetch[1] if fetch else None
            first = spans[0][1] if spans else fetch[0] if fetch else None
            if last is not None and self._clock.elapsed_s(first, last) is None:
                if len(self._late) > MAX_LATE_STEPS:
                    self._late.popleft()
                    continue
                return
            self._late.popleft()
            exposed_s = self._clock.elapsed_s(*fetch) if fetch else None
            durations = [self._measured(name, begin, end, step) or 0.0 for name, begin, end in spans]
            text = f',"step":{step},"of_mono_ns":{mono_ns},"coll_us":{_joined(durations)}'
            if exposed_s is not None:
                text += f',"exposed_s":{exposed_s:.9f}'
            recorder.write("step.late", text)

    def _write_tails(self, recorder: Recorder) -> None:
        uncounted, self._uncounted = self._uncounted, []
        tails: defaultdict[str, Durations] = defaultdict(Durations)
        for name, seconds, step in uncounted:
            tails[name].add(seconds, step)
        for name, tail in tails.items():
            hist = json.dumps({str(index): count for index, count in sorted(tail.counts.items())})
            recorder.write("coll", f',"op":"{name}","n":{tail.count},"hist":{hist},"top":{json.dumps(tail.top)}')


def _joined(durations: list[float]) -> str:
    micros = [round(seconds * 1e6) for seconds in durations]
    if len(micros) > MAX_PER_STEP:
        micros = [*micros[: MAX_PER_STEP - 1], sum(micros[MAX_PER_STEP - 1 :])]
    return f"[{','.join(map(str, micros))}]"  # json's encoder would be most of what a step costs


def _uses_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
