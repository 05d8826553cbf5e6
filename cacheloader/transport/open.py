"""From options to a session."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cacheloader.config import NO_DAEMON
from cacheloader.transport.daemon import DaemonTransport
from cacheloader.transport.embedded import PrivateDaemon
from cacheloader.transport.endpoint import SharedDaemon
from cacheloader.transport.helper import SharedHelper
from cacheloader.transport.resilient import Route

if TYPE_CHECKING:
    from cacheloader.config import TransportOptions
    from cacheloader.transport.endpoint import Endpoint


def open_transport(options: TransportOptions) -> DaemonTransport:
    """A new session for this process; nothing is connected or started before it is used.

    Args:
        options: Which daemon, which cache, and how long things may take.
    """
    return DaemonTransport(partial(_route, options), timeout_s=options.timeout_s)


def _route(options: TransportOptions) -> Route:
    if options.daemon == NO_DAEMON:
        return Route(home=SharedHelper(options), substitute=None, options=options)
    home: Endpoint
    if options.socket_path is not None:
        home = SharedDaemon(options.socket_path, patience_s=options.fallback_after_s)
    else:
        home = PrivateDaemon(options)
    return Route(home=home, substitute=SharedHelper(options), options=options)
