"""What a scenario is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from benchmarks.harness.report import Comparison
    from benchmarks.harness.runner import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A scenario that is ready to run.

    Attributes:
        entries: Contestants, in the order of each round.
        comparisons: Ratios that the report shows.
        parameters: Sizes, for the report.
        notes: What the reader has to know.
        before_each: Brings the store to the same state before each run.
    """

    entries: Sequence[Entry]
    comparisons: Sequence[Comparison]
    parameters: dict[str, Any]
    notes: Sequence[str] = field(default_factory=tuple)
    before_each: Callable[[], None] = lambda: None


class Scenario(Protocol):
    """A module of this package supplies one as ``SCENARIO``.

    Attributes:
        theme: Its name, in file names and on the command line.
        labels: Names of its contestants.
    """

    theme: ClassVar[str]
    labels: ClassVar[Sequence[str]]

    def prepare(self, folder: Path, *, small: bool) -> AbstractContextManager[Prepared]:
        """Data and servers, for as long as the block runs.

        Args:
            folder: Empty directory on the disk under test.
            small: For a smoke run: seconds, not minutes.
        """
        ...
