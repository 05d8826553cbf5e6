"""Another job that writes into the same folder: its saves are told from those of earlier attempts, and left alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cacheloader.checkpoint import survey
from cacheloader.checkpoint.commit import COMMIT_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cacheloader.checkpoint.commit import Name
    from cacheloader.checkpoint.store import File, Store

logger = logging.getLogger(__name__)


class Neighbours:
    """What others save while this attempt runs.

    No clock is asked: a save of another attempt that was not there when this one began, or was unfinished then and has
    changed since, was written by somebody who is alive.

    Args:
        store: Where checkpoints lie.
        attempt: This one.
        there: What lies there as this attempt begins.
        sees_changes: Remember what is in unfinished saves; costs a listing of each save.
    """

    def __init__(self, store: Store, *, attempt: str, there: Iterable[Name], sees_changes: bool) -> None:
        self._store = store
        self._attempt = attempt
        self._unfinished: dict[Name, Mapping[str, File]] = {}
        self._there = frozenset(there)
        self._named: set[str] = set()
        if sees_changes:
            listed = {name: store.files(str(name)) for name in self._there}
            self._unfinished = {name: files for name, files in listed.items() if COMMIT_FILE not in files}

    def saves(self) -> set[Name]:
        """Those of others that are alive; each of them is warned of once."""
        found = {name for name in survey.names(self._store) if name.attempt != self._attempt and self._is_live(name)}
        for name in sorted(found):
            if name.attempt not in self._named:
                self._named.add(name.attempt)
                logger.warning(
                    "another job is saving into %s while this one runs: %s is none of this attempt (%s); each would "
                    "resume from saves of the other, so give each a folder of its own; what it saves is not deleted "
                    "by this one",
                    self._store,
                    name,
                    self._attempt,
                )
        return found

    def _is_live(self, name: Name) -> bool:
        if name not in self._there:
            return True
        return name in self._unfinished and self._store.files(str(name)) != self._unfinished[name]
