from __future__ import annotations

import re

import pytest
import webdataset.tariterators as peer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheloader.errors import CorruptShard
from cacheloader.formats.grouping import split_name
from tests.support.tars import packed, read_all, read_all_as_webdataset

names = st.text(alphabet="ab./_\nÄ\udcff", max_size=12)


def split_as_webdataset(name: str) -> tuple[str, str] | None:
    if "/" not in name and name.startswith("__") and name.endswith("__"):
        return None
    if re.match(peer.tar_file_iterator.__defaults__[0], name):
        return None
    key, suffix = peer.base_plus_ext(name)
    return None if key is None else (key, suffix)


@given(names)
@example("a/.hidden")
@example("a.b/.hidden")
@example("/.hidden")
@example("a.b//.hidden")
@example("a\nb/c.d")
@example("a.\n/c.d")
@example("__m__/a.b")
@example("__a.b__\n")
@example("____/a.b")
@example("___/a.b")
@settings(max_examples=1000)
def test_names_split_as_in_webdataset(name):
    split = split_name(name.encode("utf-8", "surrogateescape"))
    if split is not None:
        split = tuple(part.decode("utf-8", "surrogateescape") for part in split)
    assert split == split_as_webdataset(name)


def test_only_neighbours_with_the_same_key_form_a_sample():
    shard = packed([("a.x", b"1"), ("a.y", b"2"), ("b.x", b"3"), ("a.x", b"4")])
    assert read_all(shard) == [
        {"__key__": "a", "x": b"1", "y": b"2"},
        {"__key__": "b", "x": b"3"},
        {"__key__": "a", "x": b"4"},
    ]


def test_the_suffix_is_all_behind_the_first_dot_in_lower_case():
    shard = packed([("dir.v1/img.001.SEG.Png", b"1")])
    assert read_all(shard) == [{"__key__": "dir.v1/img", "001.seg.png": b"1"}]


def test_members_of_no_sample_do_not_part_their_neighbours():
    shard = packed([("a.x", b"1"), ("README", b"-"), ("__meta__/a.z", b"-"), ("a.y", b"2")])
    assert read_all(shard) == [{"__key__": "a", "x": b"1", "y": b"2"}] == read_all_as_webdataset(shard)


@pytest.mark.parametrize("second", ["a.x", "a.X"])
def test_a_field_twice_in_a_sample_is_an_error_as_in_webdataset(second):
    shard = packed([("a.x", b"1"), ("a.y", b"2"), (second, b"3")])
    with pytest.raises(ValueError, match="duplicate file name"):
        read_all_as_webdataset(shard)
    with pytest.raises(CorruptShard, match=r"second field '[xX]' in sample 'a' at offset 2560"):
        read_all(shard)


@pytest.mark.parametrize("field", ["__key__", "__url__"])
def test_a_member_named_as_a_field_that_webdataset_sets_is_an_error(field):
    shard = packed([(f"a.{field}", b"1")])
    with pytest.raises(ValueError, match="duplicate file name"):
        read_all_as_webdataset(shard)
    with pytest.raises(CorruptShard, match=f"field {field} is reserved"):
        read_all(shard)
