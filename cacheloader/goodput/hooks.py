"""Where a run's numbers can go besides its event files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cacheloader.goodput.export.batched import Started


class Hook(Protocol):
    """One such place; called on rank 0 only, on the training thread."""

    def start(self, started: Started) -> None:
        """The attempt begins."""
        ...

    def step(self, step: int, dur_s: float, fetch_s: float, tokens: int, samples: int) -> None:
        """A step is complete."""
        ...

    def finish(self) -> None:
        """The attempt ends; send what is left."""
        ...
