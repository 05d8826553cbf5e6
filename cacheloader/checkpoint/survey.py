"""What lies in a checkpoint folder, newest first, and which of it can be resumed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheloader.checkpoint.commit import COMMIT_FILE, parse_name
from cacheloader.checkpoint.retention import removable
from cacheloader.checkpoint.verify import read_commit, wrong_size
from cacheloader.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection

    from cacheloader.checkpoint.commit import Commit, Name
    from cacheloader.checkpoint.retention import Retention
    from cacheloader.checkpoint.store import Store

ONCE_FILE = "committed-once.json"
"""Written after a folder's first commit, and before anything is ever deleted from it.

That order leaves no instant at which a kill makes ``was_ever_committed`` wrong. Before ``commit.json`` appears, which
it does complete or not at all, neither file is there: nothing was committed. From then on ``commit.json`` tells, until
this file does, too; and what deletes a commit record runs behind this file, or keeps another committed save.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One save.

    Attributes:
        name: Its folder.
        commit: Its record; ``None`` if it cannot be resumed from.
        reason: Why not.
    """

    name: Name
    commit: Commit | None
    reason: str = ""


def names(store: Store) -> list[Name]:
    """Folders of all saves, newest first."""
    found = [name for text, is_folder in store.top().items() if is_folder and (name := parse_name(text))]
    return sorted(found, reverse=True)


def look(store: Store, name: Name) -> Found:
    """One save: its record, and whether every file is there in its size."""
    try:
        commit = read_commit(store, str(name))
        reason = wrong_size(commit, store.files(str(name)))
    except CheckpointError as error:
        return Found(name=name, commit=None, reason=error.message)
    return Found(name=name, commit=None if reason else commit, reason=reason)


def was_ever_committed(store: Store) -> bool:
    """Whether the folder has, or had, a complete checkpoint."""
    return ONCE_FILE in store.top() or any(COMMIT_FILE in store.files(str(name)) for name in names(store))


def remove(store: Store, name: Name) -> None:
    """Delete a save, its commit record first, so that what is left of it on the way is no checkpoint."""
    store.remove(str(name), first=[COMMIT_FILE])


def thin_out(
    store: Store,
    retention: Retention,
    *,
    bad: Collection[Name],
    spared: Collection[Name] = (),
    good: Collection[Name] = (),
) -> list[Name]:
    """Delete what the retention does not keep.

    Args:
        store: Where the saves lie.
        retention: How many stay.
        bad: Those whose bytes were found to be wrong.
        spared: Those that stay whatever they are, and do not count as kept.
        good: Those that were looked at before and need not be again.

    Returns:
        What was deleted, oldest first.
    """
    there = names(store)
    committed = [name for name in there if name in good or look(store, name).commit is not None]
    uncommitted = set(there) - set(committed) - set(spared)
    going = removable(committed, uncommitted, bad=bad, spared=spared, retention=retention)
    for name in going:
        remove(store, name)
    return going
