from __future__ import annotations

import pytest

from cacheloader.errors import ConfigError
from cacheloader.formats import registry


def test_a_format_is_found_by_its_name():
    assert registry.named("webdataset").name == "webdataset"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"format='tfrecord' is not known; known formats are webdataset \(.tar\)"):
        registry.named("tfrecord")


@pytest.mark.parametrize("uri", ["s3://b/a.tar", "file:///x/A.TAR", "https://h/a.tar?X-Sig=a/b.c", "a.b/c.d.tar"])
def test_a_format_is_detected_by_the_ending(uri):
    assert registry.detect(uri).name == "webdataset"


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".tar.zst", ".TAR.GZ"])
def test_a_compressed_shard_is_refused_with_the_way_out(ending):
    with pytest.raises(ConfigError, match="compressed by its ending, which cannot be read yet; decompress it"):
        registry.detect(f"s3://b/a{ending}")
    assert registry.is_file_name(f"s3://b/a{ending}")


@pytest.mark.parametrize("uri", ["s3://b/a.bin", "s3://b/a", "https://h/a?x=.tar", "s3://b/tar"])
def test_an_unknown_ending_asks_for_the_format(uri):
    with pytest.raises(ConfigError, match="pass format=, one of webdataset"):
        registry.detect(uri)
    assert not registry.is_file_name(uri)
