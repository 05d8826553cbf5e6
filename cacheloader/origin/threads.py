"""A bounded pool of daemon threads for calls that may block without an end, such as those into a hung mount."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def run_to_its_end(threads: Executor | None, call: Callable[[], _T]) -> _T:
    """The result of ``call``, made on a thread; a task that is cancelled meanwhile, however often, waits for its end.

    What the call does is then known, and the files it works on may be closed: the number of one that is closed sooner
    may be another file's when the thread writes to it. The wait has no deadline, since nothing can interrupt a system
    call that a broken disk holds; who cannot wait ends the process.

    Args:
        threads: Whose thread, None for the loop's own.
        call: What is called.
    """
    work = asyncio.get_running_loop().run_in_executor(threads, call)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # looked at, so that nobody complains that nobody did
        raise


class DaemonThreads(Executor):
    """An executor whose threads never keep the process alive.

    ``ThreadPoolExecutor`` joins its threads when the interpreter ends, and one that sits in a system call on a dead NFS
    server would hold the process for ever.

    Args:
        max_threads: Threads at most; they are started as they are needed.
        name: Prefix of their names.
    """

    def __init__(self, max_threads: int, *, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        # A call in the queue has a thread that takes it next, or waits for the first to be done. To count the threads
        # that look idle would leave a call behind one that has just begun, for as long as that one hangs.
        self._num_idle = 0
        self._num_waiting = 0
        self._closed = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Call ``fn`` in one of the threads; a call that is cancelled before it starts is not made."""
        future: Future[_T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads {self._name} are closed")
            if self._num_idle:
                self._num_idle -= 1
            elif self._num_threads < self._max_threads:
                name = f"{self._name}-{self._num_threads + 1}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._num_threads += 1
            else:
                self._num_waiting += 1
            self._calls.put(call)
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """Let idle threads end. Never waits for a thread: it may be the one that hangs."""
        with self._lock:
            self._closed = True
            for _ in range(self._num_threads):
                self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # else an idle thread would keep the last result's bytes alive
            with self._lock:
                if self._num_waiting:
                    self._num_waiting -= 1
                else:
                    self._num_idle += 1
