from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ConfigError
from cacheloader.origin.location import base_url, canonical_url, key_of, scheme_of, store_url

keys = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1).filter(
    lambda key: not key.startswith("/")
)


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("s3://b/k", "s3"), ("s3a://b/k", "s3"), ("S3://b/k", "s3"), ("gcs://b/k", "gs"), ("abfss://b/k", "abfs"),
        ("https://h/k", "https"), ("/data/k", "file"), ("data/k", "file"), ("file:///k", "file"), ("hf://d/k", "hf"),
        ("a:b/c", "file"),
    ],
)  # fmt: skip
def test_a_scheme_goes_by_its_usual_name(url: str, scheme: str):
    assert scheme_of(url) == scheme


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("/data/x.tar", "file:///data/x.tar"),
        ("/data/dir/", "file:///data/dir/"),
        ("/data/./x/../y.tar", "file:///data/x/../y.tar"),
        ("file:///data/x.tar", "file:///data/x.tar"),
        ("/", "file:///"),
        ("s3a://b/k", "s3://b/k"),
        ("gcs://b/k", "gs://b/k"),
        ("s3://b/what?#%20.tar", "s3://b/what?#%20.tar"),
    ],
)
def test_a_canonical_url_names_the_same_object_in_one_way(url: str, canonical: str):
    assert canonical_url(url) == canonical
    assert canonical_url(canonical) == canonical


@pytest.mark.parametrize("url", ["", "s3://", "s3:///key", "~/data", "simplecache::s3://b/k"])
def test_what_names_no_store_is_refused(url: str):
    with pytest.raises(ConfigError):
        canonical_url(url)


@given(st.sampled_from(["s3://bucket/", "https://host:80/", "abfs://box@account.net/", "file:///"]), keys)
def test_store_and_key_make_the_url(store: str, key: str):
    assert store_url(store + key) == store
    assert key_of(store + key) == key


@pytest.mark.parametrize(
    ("pattern", "base"),
    [
        ("s3://b/train/*.tar", "s3://b/train/"),
        ("s3://b/train-{0..9}/x.tar", "s3://b/"),
        ("s3://b/train/", "s3://b/train/"),
        ("s3://b/train/x.tar", "s3://b/train/"),
        ("s3://b/*", "s3://b/"),
        ("s3://b", "s3://b/"),
        ("/data/*/x.tar", "/data/"),
        ("file:///*.tar", "file:///"),
        ("https://h/train-{000..009}.tar", "https://h/"),
    ],
)
def test_the_base_of_a_pattern_is_the_deepest_directory_above_all_that_it_matches(pattern: str, base: str):
    assert base_url(pattern) == base
