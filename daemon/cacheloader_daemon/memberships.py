"""Groups of a user as the system's database has them, beside those that the kernel shows of a process.

A process may have fewer groups than its user: containers and batch systems often start one with its main group alone.
The database may be a directory service that answers late or not at all, so it is asked on threads, with a deadline, and
what it said is remembered for some minutes.

Source: getgrouplist(3), nsswitch.conf(5).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from cacheloader.origin.threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.fdpass import PeerCredentials

log = logging.getLogger(__name__)

KEPT_S = 300.0
"""Who is taken out of a group has lost its rights here after this time, on his next connection."""

FAILURE_KEPT_S = 30.0
MAX_USERS = 1024
DEADLINE_S = 5.0
_MAX_THREADS = 4


class _Known(msgspec.Struct, frozen=True):
    groups: frozenset[int]
    until_s: float


class Memberships:
    """What the database says of the users who connect.

    Args:
        loop: The running loop.
        look_up: Groups of a user; may block.
        deadline_s: How long a connection waits for it; after that the groups of its process count alone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        look_up: Callable[[int], frozenset[int]] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._loop = loop
        self._look_up = look_up or groups_of
        self._deadline_s = deadline_s
        self._known: OrderedDict[int, _Known] = OrderedDict()  # used longest ago first
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = DaemonThreads(_MAX_THREADS, name="groups")

    def completed(self, peer: PeerCredentials) -> PeerCredentials:
        """``peer`` with the groups of its user as far as they are known."""
        known = self._known.get(peer.uid)
        return peer if known is None else msgspec.structs.replace(peer, groups=peer.groups | known.groups)

    def when_known(self, uid: int, call: Callable[[], None]) -> None:
        """Call ``call`` once the groups of ``uid`` are known, or cannot be had in time: at once, if they are."""
        known = self._known.get(uid)
        if known is not None and self._loop.time() < known.until_s:
            self._known.move_to_end(uid)
            call()
            return
        waiting = self._waiting.setdefault(uid, [])
        waiting.append(call)
        if len(waiting) == 1:
            task = self._loop.create_task(self._ask(uid))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Nobody is told any more."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()

    async def _ask(self, uid: int) -> None:
        groups: frozenset[int] = frozenset()
        kept_s = FAILURE_KEPT_S
        try:
            async with asyncio.timeout(self._deadline_s):
                groups = await self._loop.run_in_executor(self._threads, self._look_up, uid)
            kept_s = KEPT_S
        except TimeoutError:
            log.warning(
                "the groups of user %d did not come from the system's database in %g s; his process's count alone",
                uid,
                self._deadline_s,
            )
        except OSError as error:
            log.warning("the groups of user %d cannot be looked up: %s", uid, error)
        self._known[uid] = _Known(groups, self._loop.time() + kept_s)
        self._known.move_to_end(uid)
        while len(self._known) > MAX_USERS:
            self._known.popitem(last=False)
        for call in self._waiting.pop(uid, []):
            call()


def groups_of(uid: int) -> frozenset[int]:
    """All groups of the user ``uid`` by the system's database, none if it does not know him. May block.

    Raises:
        OSError: The database cannot be asked.
    """
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    return frozenset(os.getgrouplist(user.pw_name, user.pw_gid))
