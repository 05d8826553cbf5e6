"""The short form of the soak; ``python -m tests.soak`` is the long one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.soak.passage import pass_through

if TYPE_CHECKING:
    from pathlib import Path


def test_memory_and_descriptors_of_a_daemon_stay_level_while_bytes_pass_through(tmp_path: Path) -> None:
    report = pass_through(tmp_path, total_bytes=40 * 2**20, seed=3, num_shards=16, shard_bytes=2**20)
    assert report.evictions > 10
    # The first quarter fills caches and the allocator's arenas.
    settled = report.rss_bytes[len(report.rss_bytes) // 4]
    assert max(report.rss_bytes) <= settled + 48 * 2**20
    assert max(report.fds) <= report.fds[0] + 8
