"""How long a helper process waits for those who share it."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from cacheloader.transport.direct_door import Door

if TYPE_CHECKING:
    from pathlib import Path


async def test_who_had_it_started_is_waited_for_and_after_that_it_leaves_when_nobody_is_there(tmp_path: Path) -> None:
    path = tmp_path / "helper.sock"

    async def converse(sock: socket.socket) -> None:
        sock.close()

    door = Door(path, converse=converse, idle_s=0.0)
    loop = asyncio.get_running_loop()
    assert door._leaving is not None
    assert door._leaving.when() - loop.time() > 20
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(str(path))
    await door.closed()
    assert not path.exists()
    client.close()
