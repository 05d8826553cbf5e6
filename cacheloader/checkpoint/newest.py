"""The newest checkpoint of another tool that can be whole, for trainers that write their own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cacheloader.checkpoint.foreign import examine, newest_first
from cacheloader.checkpoint.store import open_store
from cacheloader.errors import NoValidCheckpoint

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

logger = logging.getLogger(__name__)


def newest_whole(
    folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, read_bytes: bool = True
) -> str | None:
    """Where the newest checkpoint lies in which nothing is missing, torn or altered, as far as its format tells.

    For Lightning's files, folders of the Hugging Face Trainer, torch DCP and torchtitan. The step in the name decides
    what is newer. Call it on rank 0 and tell the others, or on each where all see the same folder.

    Args:
        folder: Where they lie: a path, or a URL that fsspec knows.
        storage_options: What fsspec's file system takes.
        read_bytes: Compare checksums, where the format has some; else sizes only.

    Returns:
        Its path or URL; ``None`` if there is no checkpoint at all.

    Raises:
        NoValidCheckpoint: There are some, and none is whole.
    """
    store = open_store(folder, storage_options)
    reasons = []
    for name, _ in newest_first(store):
        looked = examine(store, name, read_bytes=read_bytes)
        reason = looked.reason if looked else "it is gone"
        if not reason:
            return f"{store}/{name}"
        logger.warning("passed over %s: %s", name, reason)
        reasons.append(f"{name}: {reason}")
    if reasons:
        raise NoValidCheckpoint(
            f"there are {len(reasons)} checkpoints in {store} and none is whole ({'; '.join(reasons[:10])}); repair or "
            "remove them to start at step 0"
        )
    return None
