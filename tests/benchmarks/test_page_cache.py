from __future__ import annotations

import pytest

from benchmarks.harness import environment, page_cache


def test_a_file_that_was_read_is_in_memory_and_one_that_was_dropped_is_not(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20) + b"x")
    page_cache.warm([path])
    assert page_cache.is_resident(path)
    if environment.filesystem(tmp_path) not in ("ext4", "xfs", "btrfs"):
        pytest.skip("this file system keeps its files in memory")
    page_cache.drop([path])
    assert not page_cache.is_resident(path)
    page_cache.warm([path])
    assert page_cache.is_resident(path)


def test_an_empty_file_is_in_memory(tmp_path):
    (tmp_path / "empty").touch()
    assert page_cache.is_resident(tmp_path / "empty")
