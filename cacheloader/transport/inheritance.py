"""What a forked child must not keep: its copies of the parent's connections and leased files.

A copy of a connection would keep the parent's session alive after the parent's death, and a copy of a leased file
would keep its disk space taken. Both are closed in the child at once, without a word to the daemon: they are the
parent's. The child opens its own session.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """Something that holds a descriptor."""

    def close_in_child(self) -> None:
        """Close this process's copy of the descriptor, and tell nobody."""
        ...


_open: WeakSet[Inherited] = WeakSet()


def close_after_fork(holder: Inherited) -> None:
    """Let ``holder`` be closed in every child that this process forks from now on."""
    _open.add(holder)


def _close_all() -> None:
    for holder in list(_open):
        holder.close_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_close_all)
