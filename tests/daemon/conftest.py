"""The daemon's own loop under every test of it, real daemons, and a data set in a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from tests.support.node_daemon import NodeDaemon
from tests.support.shard_sets import ShardSet, write_shards

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


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
    """Eight shards of about 40 kB."""
    return write_shards(tmp_path_factory.mktemp("shards"), num_shards=8, samples_per_shard=10)
