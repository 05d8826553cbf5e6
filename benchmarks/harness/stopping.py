"""SIGTERM as an exception, so that servers and contestants are ended and scratch files removed on the way out."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType, TracebackType


class Stop:
    """Raises ``SystemExit`` wherever the signal finds the program, and does not let it be lost there.

    Code that is interrupted may swallow the exception (a destructor, a callback of C) or fail on its own way out and
    put another error in its place: ``check`` and the end of ``with`` raise it once more.

    Attributes:
        number: The signal that came, ``None`` before.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def listen(self) -> None:
        """Handle SIGTERM from now on; in the main thread."""
        signal.signal(signal.SIGTERM, self._came)

    def check(self) -> None:
        """Leave if the signal came before.

        Raises:
            SystemExit: With 128 and the signal's number, as a shell tells it.
        """
        if self.number is not None:
            raise SystemExit(128 + self.number)

    def __enter__(self) -> None:
        self.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, SystemExit):
            self.check()

    def _came(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        self.check()
