"""What ``Run`` asks of whatever measures inside a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cacheloader.goodput.recorder import Recorder


class Meter(Protocol):
    """Measures collectives and device idle time; ``measuring`` has one for torch."""

    def start(self) -> None:
        """The run begins."""
        ...

    def fetching(self) -> None:
        """The loop asks for a batch."""
        ...

    def fetched(self) -> None:
        """The loop has it; kernels of the step come next."""
        ...

    def step_fields(self, recorder: Recorder, step: int, mono_ns: int) -> str:
        """What to add to the step's event: JSON with a comma in front, "" for nothing. May write events of its own."""
        ...

    def stop(self, recorder: Recorder) -> None:
        """The run ends; write what is left."""
        ...
