"""Many bytes through a small cache: what of the daemon grows with them?"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.node_daemon import NodeDaemon
from tests.support.tars import packed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAMPLES_EVERY = 20
"""Parts of the passage after each of which the daemon is looked at."""


@dataclass
class Report:
    """What happened.

    Attributes:
        seed: Of the order in which shards were read.
        fetched_bytes: That came from the origin, by the daemon's own account.
        reads: Shards that were read, each compared with its original.
        evictions: Shards that went for others.
        rss_bytes: Of the daemon, after each part.
        fds: Likewise.
        cpu_s: Of the daemon, index workers not counted.
        wall_s: How long it took.
    """

    seed: int
    fetched_bytes: int = 0
    reads: int = 0
    evictions: int = 0
    rss_bytes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def as_record(self) -> dict[str, Any]:
        return dict(vars(self))


def pass_through(
    folder: Path,
    *,
    total_bytes: int,
    seed: int,
    num_shards: int = 64,
    shard_bytes: int = 2 * 2**20,
    told: Callable[[Report], None] = lambda _report: None,
) -> Report:
    """Read shards in a new order each epoch, through a cache of half their size, until so much was fetched."""
    rng = np.random.default_rng(seed)
    shards = folder / "shards"
    shards.mkdir()
    contents = []
    for number in range(num_shards):
        contents.append(packed([("a.bin", rng.bytes(shard_bytes // 2)), ("b.bin", rng.bytes(shard_bytes // 2 - 4096))]))
        (shards / f"{number:04d}.tar").write_bytes(contents[-1])
    size = num_shards * shard_bytes // 2
    daemon = NodeDaemon(directory=folder / "cache", cache_size=str(size))
    report, started_s, draw = Report(seed=seed), time.monotonic(), random.Random(seed)
    daemon.start()
    try:
        done_bytes = 0
        while report.fetched_bytes < total_bytes:
            # A new client each epoch, as jobs come and go.
            with daemon.connect() as client:
                client.open_dataset([shards])
                order = draw.sample(range(num_shards), num_shards)
                client.follow(order, rows=10)
                for place, shard in enumerate(order):
                    lease = client.acquire(shard)
                    assert lease.read() == contents[shard]
                    lease.close()
                    client.release(shard)
                    client.advance((place + 1) * 10)
                    report.reads += 1
            status = daemon.status()
            report.fetched_bytes = sum(status["account"]["remote_read_bytes"].values())
            if report.fetched_bytes - done_bytes >= total_bytes // SAMPLES_EVERY:
                done_bytes = report.fetched_bytes
                report.rss_bytes.append(daemon.rss_bytes)
                report.fds.append(daemon.num_fds)
                told(report)
        report.evictions, report.cpu_s = status["plan"]["evictions"], round(status["cpu_s"], 2)
        assert "Traceback" not in daemon.log
        assert daemon.stop() == 0
    finally:
        daemon.kill()
    report.wall_s = round(time.monotonic() - started_s, 1)
    return report
