"""Real daemons for fault tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.node_daemon import NodeDaemon
from tests.support.shard_sets import ShardSet, write_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Callable[..., NodeDaemon]]:
    """Makes daemons, of one directory unless another is given; all are stopped in the end."""
    made: list[NodeDaemon] = []

    def make(**options: Any) -> NodeDaemon:
        made.append(NodeDaemon(**{"directory": tmp_path / "cache", **options}))
        return made[-1]

    yield make
    for daemon in made:
        daemon.kill()


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """Eight shards of about 2 MB, which take a moment to bring."""
    folder = tmp_path_factory.mktemp("shards")
    return write_shards(folder, num_shards=8, samples_per_shard=20, sample_bytes=100_000)
