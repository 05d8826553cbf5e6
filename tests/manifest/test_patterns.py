from __future__ import annotations

import fnmatch
import re

import pytest
from braceexpand import UnbalancedBracesError, braceexpand
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cacheloader.errors import ConfigError
from cacheloader.manifest.patterns import expand_all, expand_braces, glob_regex, is_glob

pieces = st.sampled_from([*"{},.ab0-/\\", "{1..3}", "{08..11}", "{-1..1}", "{a..e..2}", "{x,y}", "..", "{c..a}"])
patterns = st.lists(pieces, max_size=8).map("".join)


def closes_before_it_opens(pattern: str) -> bool:
    depth = 0
    for mark in re.sub(r"\\.", "", pattern):
        depth += {"{": 1, "}": -1}.get(mark, 0)
        if depth < 0:
            return True
    return False


@given(patterns)
@example("{000..001}")
@example("{-01..10..5}")
@example("{Z..a}")
@example("{c..A..9}")
@example("{0..-0}")
@example("x{a}{}y{b,}")
@example(r"\{a,b\}{c\,d,e}\\")
@example("{a,{b,c}{1..2},}")
@settings(max_examples=500)
def test_braces_expand_as_webdataset_expands_them(pattern):
    # braceexpand unescapes twice what stands in braces that list nothing: "{\\\\}" loses its backslash there.
    assume(not re.search(r"\{[^{},]*\\\\[^{},]*\}", pattern))
    if closes_before_it_opens(pattern):  # braceexpand lets "}{" pass as it stands
        with pytest.raises(ConfigError, match="do not match"):
            list(expand_braces(pattern))
        return
    try:
        expected = list(braceexpand(pattern))
    except UnbalancedBracesError:
        with pytest.raises(ConfigError, match="do not match"):
            list(expand_braces(pattern))
    else:
        assert list(expand_braces(pattern)) == expected


def test_a_large_range_is_named_in_order():
    urls = expand_all(["s3://b/{val,train}-{000000..001023}.tar"])
    assert len(urls) == 2048
    assert urls[0] == "s3://b/val-000000.tar"
    assert urls[1024] == "s3://b/train-000000.tar"
    assert urls[-1] == "s3://b/train-001023.tar"


def test_a_range_without_end_is_refused_before_it_fills_the_memory():
    with pytest.raises(ConfigError, match="name more than 10 shards"):
        expand_all(["{0..99999999999}{0..9999999}"], max_shards=10)


@pytest.mark.parametrize(
    ("glob", "uri", "matches"),
    [
        ("s3://b/train/*.tar", "s3://b/train/0.tar", True),
        ("s3://b/train/*.tar", "s3://b/train/sub/0.tar", False),
        ("s3://b/train/*.tar", "s3://b/train/.0.tar", False),
        ("s3://b/train/.*.tar", "s3://b/train/.0.tar", True),
        ("s3://b/**/*.tar", "s3://b/0.tar", True),
        ("s3://b/**/*.tar", "s3://b/x/y/0.tar", True),
        ("s3://b/**/*.tar", "s3://b/x/.y/0.tar", False),
        ("s3://b/**", "s3://b/x/y/0.tar", True),
        ("s3://b/x**y.tar", "s3://b/x/y.tar", False),
        ("s3://b/?.tar", "s3://b/0.tar", True),
        ("s3://b/?.tar", "s3://b/10.tar", False),
        ("s3://b/x?y", "s3://b/x/y", False),
        ("s3://b/[0-4].tar", "s3://b/3.tar", True),
        ("s3://b/[!0-4].tar", "s3://b/3.tar", False),
        ("s3://b/[!0-4].tar", "s3://b/5.tar", True),
        ("s3://b/x[!a]y.tar", "s3://b/x/y.tar", False),
        ("s3://b/[*].tar", "s3://b/*.tar", True),
        ("s3://b/[*].tar", "s3://b/0.tar", False),
        ("s3://b/[]^[].tar", "s3://b/].tar", True),
        ("s3://b/[]^[].tar", "s3://b/^.tar", True),
        ("s3://b/[]^[].tar", "s3://b/a.tar", False),
        ("s3://b/[ab.tar", "s3://b/[ab.tar", True),
        ("s3://b/a+(b)*.tar", "s3://b/a+(b)1.tar", True),
        ("s3://b/*.tar", "s3://b/0xtar", False),
        ("s3://b/*.tar", "s3://b/0.tar.gz", False),
    ],
)
def test_globs_match_as_in_a_shell(glob, uri, matches):
    assert bool(glob_regex(glob).fullmatch(uri)) is matches


@given(st.text(alphabet="ab*?[]!^-\\", max_size=7), st.text(alphabet="ab*[]!^-\\", min_size=1, max_size=5))
@settings(max_examples=500)
def test_globs_of_a_single_name_match_as_in_fnmatch(glob, name):
    assert bool(glob_regex(glob).fullmatch(name)) is fnmatch.fnmatchcase(name, glob)


@pytest.mark.parametrize(
    ("url", "glob"),
    [
        ("s3://b/*.tar", True),
        ("s3://b/a?.tar", True),
        ("s3://b/[ab].tar", True),
        ("s3://b/a.tar", False),
        ("https://h/a.tar?X-Sig=[1]", False),
        ("https://h/*.tar", True),
    ],
)
def test_a_question_mark_in_an_http_url_is_no_wildcard(url, glob):
    assert is_glob(url) is glob
