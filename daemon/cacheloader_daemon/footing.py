"""What the daemon's process is to its node. Threads and children inherit it, so it is settled before there are any."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

from cacheloader.origin.environment import forget_store_variables

if TYPE_CHECKING:
    from cacheloader_daemon.config import DaemonConfig


def settle(config: DaemonConfig) -> None:
    """Take priority, limits and rights of new files; give up what belongs to the job that started us.

    Raises:
        ConfigError: This process may use none of the processors that are named.
    """
    if config.private:
        forget_store_variables()
    _raise_descriptor_limit()
    config.priority.take()
    os.umask(0o077)
    # numpy would start one thread a core for linear algebra, of which there is none here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _raise_descriptor_limit() -> None:
    """Two descriptors travel with every lease and one belongs to every client; the usual soft limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
