"""From a signal that asks a process to leave to a step after which all ranks leave together."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

EXIT_STATUS = 75
"""EX_TEMPFAIL: saved, and to be started again. 0 would tell a scheduler that training is over."""


class StopSignal:
    """Notes that a signal came; whoever handled it before is not called, since that would end the process.

    Args:
        number: The signal, such as ``signal.SIGTERM``.

    Raises:
        ConfigError: This is not the main thread, which alone may handle signals.
    """

    def __init__(self, number: signal.Signals) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"{number.name} can only be handled by a Checkpointer made in the main thread; make it there, or leave "
                "stop_signal= out"
            )
        self.came = False
        self._number = number
        self._before: Any = signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True

    def close(self) -> None:
        """Let whoever was there before handle the signal again."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(self._number) == self._note:
            signal.signal(self._number, signal.SIG_DFL if self._before is None else self._before)
