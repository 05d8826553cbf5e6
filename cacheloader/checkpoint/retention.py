"""Which checkpoints may go: pure, from what is there to what is deleted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from cacheloader.checkpoint.commit import Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many checkpoints stay.

    Attributes:
        keep_last: The newest ones.
        keep_every: Beside those, or beside the newest, each whose step is a multiple of it.

    Neither of them: all stay.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} would keep nothing; pass 1 or more, or None for all")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever to be deleted."""
        return self.keep_last is None and self.keep_every is None


def removable(
    committed: Iterable[Name],
    uncommitted: Iterable[Name],
    *,
    bad: Collection[Name],
    spared: Collection[Name] = (),
    retention: Retention,
) -> list[Name]:
    """What to delete, oldest first.

    The newest committed checkpoint that is not known to be bad stays whatever the retention says, and so does
    everything newer than it. Those known to be bad do not count as kept.

    Args:
        committed: Checkpoints with a commit record and all files in their sizes.
        uncommitted: Folders of saves without one.
        bad: Committed ones whose bytes were found to be wrong.
        spared: Committed ones that stay and do not count as kept: they could not be read, or are another job's.
        retention: How many stay.
    """
    committed = [name for name in committed if name not in spared]
    good = sorted(name for name in committed if name not in bad)
    if not good or retention.keeps_all:
        return []
    newest = good[-1]
    kept = set(good[-(retention.keep_last or 1) :])
    if retention.keep_every is not None:
        kept |= {name for name in good if name.step % retention.keep_every == 0}
    leftovers = [name for name in (*uncommitted, *(name for name in committed if name in bad)) if name < newest]
    return sorted({*(name for name in good if name not in kept), *leftovers})
