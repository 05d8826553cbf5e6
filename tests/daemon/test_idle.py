"""A daemon of which nobody wants anything does nothing: it shares the node with a collective."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_daemon import NodeDaemon
    from tests.support.shard_sets import ShardSet

STILL_S = 2.0
MOST_WAKE_UPS = 1


def sleeps(pids: list[int]) -> dict[Path, int]:
    """For each thread of some processes, how often it has gone to sleep, and so was woken."""
    found: dict[Path, int] = {}
    for thread in (Path(f"/proc/{pid}/task/{name}") for pid in pids for name in os.listdir(f"/proc/{pid}/task")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = (thread / "status").read_text().splitlines()
            found[thread] = sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))
    return found


class Stillness:
    """Whether the processes have slept through the last seconds, all threads the same and one wake-up aside."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._begin()

    def has_come(self) -> bool:
        now = sleeps(self._pids)
        woken = sum(count - self._sleeps.get(thread, 0) for thread, count in now.items())
        if now.keys() != self._sleeps.keys() or woken > MOST_WAKE_UPS:
            self._begin()
        return time.monotonic() - self._since_s >= STILL_S

    def _begin(self) -> None:
        self._since_s = time.monotonic()
        self._sleeps = sleeps(self._pids)


@pytest.mark.timeout(300)
def test_an_idle_daemon_sleeps_with_a_client_and_without(daemons: Callable[..., NodeDaemon], shards: ShardSet) -> None:
    daemon = daemons().start()
    with daemon.connect() as client:
        manifest = client.open_dataset([shards.folder])
        client.follow(range(len(manifest)))
        for shard in range(len(manifest)):
            client.acquire(shard).close()
            client.release(shard)
            client.advance(shard + 1)
        pids = [daemon.pid, *daemon.children]
        wait_until(Stillness(pids).has_come, timeout_s=100)
    wait_until(Stillness(pids).has_come, timeout_s=100)
