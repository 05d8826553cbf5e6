"""Signals at a moment of the test's choice: handlers raise between any two lines, and chance says which."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_WAITS_IN = "torch/utils/data/dataloader.py"
_AGAIN_S = 0.01


@contextmanager
def handled_in_next(
    number: signal.Signals, handler: Callable[[int, FrameType | None], object], *, is_due: bool = False
) -> Iterator[None]:
    """Meanwhile ``handler`` takes a signal only where the main thread waits for workers in torch's ``next``.

    One that comes elsewhere, before ``next`` or in the lines behind it, is handled as soon as the thread is there.

    Args:
        number: The signal.
        handler: May raise.
        is_due: Whether the signal is sent, once, as soon as the thread is there.
    """
    main = threading.main_thread().ident
    assert main is not None
    wanted, is_over = threading.Event(), threading.Event()
    if is_due:
        wanted.set()

    def take(received: int, frame: FrameType | None) -> None:
        inner = frame
        while inner is not None and not inner.f_code.co_filename.endswith(_WAITS_IN):
            inner = inner.f_back
        if inner is None:
            wanted.set()
        elif wanted.is_set() or not is_due:  # the one that is due may have been sent twice
            wanted.clear()
            handler(received, frame)

    def send_again() -> None:
        while not is_over.wait(_AGAIN_S):
            if wanted.is_set():
                signal.pthread_kill(main, number)

    sender = threading.Thread(target=send_again)
    before = signal.signal(number, take)
    sender.start()
    try:
        yield
    finally:
        is_over.set()
        sender.join()
        signal.signal(number, before)


@contextmanager
def dead_workers_told_in_next() -> Iterator[None]:
    """Meanwhile torch tells of a dead worker in ``next`` alone; else it raises in the lines of the test as well.

    To be entered behind the first ``iter`` of a loader with workers, which puts torch's handler in place.
    """
    tell = signal.getsignal(signal.SIGCHLD)
    assert callable(tell), "torch has no handler for dead workers yet"
    with handled_in_next(signal.SIGCHLD, tell):
        yield
