"""Real daemons for fault tests."""

from __future__ import annotations

import json
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


@pytest.fixture
def url(shards: ShardSet, s3: Any, bucket: str, prefix: str) -> str:
    """The data set in the object store, with sample counts beside it."""
    url = shards.upload(s3, bucket, prefix.rstrip("/"))
    counts = {path.name: 20 for path in shards.paths}
    s3.put_object(Bucket=bucket, Key=f"{prefix}sizes.json", Body=json.dumps(counts).encode())
    return url
