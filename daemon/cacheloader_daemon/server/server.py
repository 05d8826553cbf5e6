"""All connections of the daemon: accepted, counted, and told when it leaves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cacheloader.errors import DaemonUnavailable
from cacheloader_daemon.server.connection import Connection, ConnectionLimits
from cacheloader_daemon.server.listener import Listener

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from cacheloader.protocol.messages import Hello, Welcome
    from cacheloader_daemon.memberships import Memberships
    from cacheloader_daemon.server.connection import Handler
    from cacheloader_daemon.server.listener import Admission

log = logging.getLogger(__name__)


class Server:
    """Serves a listening socket until it is closed.

    Args:
        sock: The listening socket, owned from now on.
        path: Its file, to be removed at the end; ``None`` if somebody else owns it.
        loop: The running loop.
        admission: Who may connect.
        max_connections: Clients at once.
        welcome: Makes the answer to ``Hello``.
        open_session: Makes the handler of a connection's requests.
        occupancy_changed: Called with the number of connections after each change.
        limits: What one connection may cost.
        memberships: Groups of a user beside those of his process.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        path: Path | None,
        loop: asyncio.AbstractEventLoop,
        admission: Admission,
        max_connections: int,
        welcome: Callable[[int], Welcome],
        open_session: Callable[[Connection], Handler],
        occupancy_changed: Callable[[int], None],
        limits: ConnectionLimits | None = None,
        memberships: Memberships | None = None,
    ) -> None:
        self._loop = loop
        self._welcome = welcome
        self._open_session = open_session
        self._occupancy_changed = occupancy_changed
        self._limits = limits or ConnectionLimits()
        self._connections: set[Connection] = set()
        self._listener = Listener(
            sock,
            loop=loop,
            admission=admission,
            max_connections=max_connections,
            num_connections=lambda: len(self._connections),
            accepted=self._accepted,
            path=path,
            memberships=memberships,
        )

    @property
    def num_connections(self) -> int:
        """Clients connected now."""
        return len(self._connections)

    def num_connections_of(self, owner: str) -> int:
        """Those of them that belong to a tenant."""
        return sum(connection.owner == owner for connection in self._connections)

    def stop_accepting(self) -> None:
        """Remove the socket; calling it again does nothing."""
        self._listener.close()

    def close(self, why: str) -> None:
        """Stop accepting, tell every client ``why``, and close its connection; calling it again does nothing."""
        self.stop_accepting()
        for connection in list(self._connections):
            connection.fail(DaemonUnavailable(why))
            connection.close()

    def _accepted(self, sock: socket.socket) -> None:
        self._connections.add(
            Connection(
                sock,
                loop=self._loop,
                limits=self._limits,
                welcome=self._welcome,
                open_handler=self._greeted,
                closed=self._left,
            )
        )
        self._occupancy_changed(len(self._connections))

    def _greeted(self, connection: Connection, hello: Hello) -> Handler:
        log.debug("process %d connected: %s", connection.peer.pid, hello.client[:200])
        return self._open_session(connection)

    def _left(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._occupancy_changed(len(self._connections))
