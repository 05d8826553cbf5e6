"""Where a run's numbers can go besides its event files."""

from __future__ import annotations

from typing import Protocol


class Hook(Protocol):
    """One such place; called on rank 0 only, on the training thread."""

    def start(self, run: str, attempt: str, step: int) -> None:
        """The attempt begins behind ``step``."""
        ...

    def step(self, step: int, dur_s: float, fetch_s: float, tokens: int, samples: int) -> None:
        """A step is complete."""
        ...

    def finish(self) -> None:
        """The attempt ends; send what is left."""
        ...
