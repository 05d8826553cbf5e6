from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheloader.transport.control import stop_daemon
from tests.support.shard_sets import ShardSet, write_shards


@pytest.fixture(scope="session")
def shard_set(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """16 shards of 64 samples, about 32 MiB."""
    return write_shards(tmp_path_factory.mktemp("shards"), num_shards=16, samples_per_shard=64, sample_bytes=32_000)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Iterator[Path]:
    """An empty cache directory; the private daemon that a test starts there is stopped behind it."""
    directory = tmp_path / "cache"
    yield directory
    stop_daemon(directory, timeout_s=60)
