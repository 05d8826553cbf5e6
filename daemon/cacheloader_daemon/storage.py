"""Taking the cache directories that a configuration names: locks, stores, and the pool that makes them one."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from cacheloader.errors import CacheUnusable
from cacheloader_daemon.garbage import no_collection
from cacheloader_daemon.lock import DirectoryLock
from cacheloader_daemon.store import Pool, Scrubber, Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cacheloader_daemon.config import DaemonConfig

log = logging.getLogger(__name__)


@contextmanager
def open_pool(config: DaemonConfig) -> Iterator[Pool]:
    """The pool of all directories, locked for us alone, until the block ends.

    A directory that its disk does not let us use is left out, as long as there is another one; a directory that is
    somebody else's, or not made for this version, is a mistake in the configuration and ends the start.

    Raises:
        CacheUnusable: No directory can be used, or one must not be.
        DaemonUnavailable: Another daemon uses one.
    """
    with ExitStack() as stack:
        stores: list[Store] = []
        unusable: dict[Path, CacheUnusable] = {}
        for directory in config.cache_dirs:
            try:
                stack.enter_context(DirectoryLock(directory))
                with no_collection():
                    stores.append(Store.open(directory))
            except CacheUnusable as error:
                if len(config.cache_dirs) == 1 or not isinstance(error.__cause__, OSError):
                    raise
                unusable[directory] = error
                log.error("%s; the cache goes on without it", error.message)  # noqa: TRY400
            else:
                stack.callback(stores[-1].close)
        if not stores:
            raise next(iter(unusable.values()))
        yield Pool(
            stores,
            cache_bytes=config.cache_bytes,
            floors=config.floors,
            verify_on_lease=config.verify_on_lease,
            unusable=unusable,
        )


@contextmanager
def scrubbing(pool: Pool, config: DaemonConfig) -> Iterator[Scrubber | None]:
    """A scrub of the pool for the time of the block, if one is configured."""
    if not config.scrub_interval_s:
        yield None
        return
    scrubber = Scrubber(pool, interval_s=config.scrub_interval_s, max_bytes_per_s=config.scrub_bytes_per_s)
    try:
        yield scrubber
    finally:
        scrubber.stop()
