from __future__ import annotations

import fnmatch
import re
import time
import tracemalloc

import pytest
from braceexpand import UnbalancedBracesError, braceexpand
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cacheloader.errors import ConfigError
from cacheloader.manifest.patterns import expand_all, expand_braces, glob_regex, is_glob, num_expanded

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
@settings(max_examples=500, deadline=None)
def test_braces_expand_as_webdataset_expands_them(pattern):
    # braceexpand unescapes twice what stands in braces that list nothing: "{\\\\}" loses its backslash there.
    assume(not re.search(r"\{(?:\\.|[^{},\\])*\\\\(?:\\.|[^{},\\])*\}", pattern))
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


@pytest.mark.parametrize(
    "pattern",
    ["a", "", "{a,b}", "{a,b}{0..3}", "x{a,{0..9..3},c}y", "{a}", "{{0..2}}", "{a..e..2}", "{5..1}", "{}", "{,}",
     r"\\{a,b\\}", "{0..3}/{x,y{1..2}}/{a}"],
)  # fmt: skip
def test_what_a_pattern_stands_for_is_counted_without_writing_it_out(pattern):
    assert num_expanded(pattern) == len(list(expand_braces(pattern)))


def test_patterns_that_name_too_much_together_are_refused_without_writing_them_out():
    tracemalloc.start()
    with pytest.raises(ConfigError, match="name more than 10000000 shards"):
        expand_all(["a{0..4999999}", "b{0..999999}{0..999999999}{a,b}"])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10**6


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


PIECES = ["*", "**", "/", "a", "b", ".", "?", "[ab]", "/**/", "*a", "[!a]"]


def matches_slowly(glob: list[str], name: list[str]) -> bool:
    """The rule itself, directory by directory, with every possibility tried."""
    if not glob or not name:
        return not glob and not name
    if glob[0] == "**" and len(glob) > 1:
        crossed = len(name) > 1 and not name[0].startswith(".") and matches_slowly(glob, name[1:])
        return crossed or matches_slowly(glob[1:], name)
    if glob == ["**"]:
        return not any(part.startswith(".") for part in name)
    hidden = name[0].startswith(".") and glob[0][:1] in {"*", "?", "["}
    return not hidden and fnmatch.fnmatchcase(name[0], glob[0]) and matches_slowly(glob[1:], name[1:])


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join), st.text(alphabet="aab./", max_size=10))
@example("**/*/**/", "ab.//ba../")
@example("**/.a/**/x", ".a/.a/x")
@example("**/a/b/**/c", "a/a/b/c")
@settings(max_examples=1000, deadline=None)
def test_globs_match_as_if_every_possibility_were_tried(glob, name):
    assert bool(glob_regex(glob).fullmatch(name)) is matches_slowly(glob.split("/"), name.split("/"))


@pytest.mark.parametrize(
    ("glob", "name"),
    [
        ("*a" * 5 + "*b", "a" * 200),
        ("*a" * 2000 + "*b", "a" * 1000),
        ("*a" * 400 + "b", "a" * 1000),
        ("*?" * 500 + "b", "a" * 1000),
        ("**/a/" * 60 + "x", "a/" * 500),
        ("**/" * 1000 + "x", "a/" * 500),
        ("**/*a*a*b*/" * 50 + "x", "aaab/" * 200),
        ("**/" + "*a" * 100 + "/x", ("a" * 200 + "/") * 5),
    ],
)
def test_no_glob_takes_more_than_a_moment_to_match(glob, name):
    pattern = glob_regex("s3://b/" + glob)
    begun_s = time.process_time()
    assert not pattern.fullmatch("s3://b/" + name)
    assert time.process_time() - begun_s < 5


def test_a_glob_that_is_longer_than_any_name_is_refused():
    with pytest.raises(ConfigError, match="has 8014 characters, and a name has 4096 at most"):
        glob_regex("s3://b/" + "*a" * 4000 + "/*.tar.")


@pytest.mark.parametrize("pattern", ["{" * 5000 + "a,b" + "}" * 5000, "{a,b}" * 5000])
def test_more_braces_than_anybody_needs_are_refused(pattern):
    with pytest.raises(ConfigError, match="more than 100 braces"):
        expand_all([pattern])


def test_a_short_pattern_can_not_stand_for_more_text_than_there_is_memory():
    with pytest.raises(ConfigError, match="too long for so many"):
        expand_all(["{0..999999}" + "x" * 100_000], max_shards=10_000)


def test_numbers_of_thousands_of_digits_are_no_range():
    pattern = "{1.." + "9" * 5000 + "}"
    assert expand_all([pattern]) == [pattern]


def is_misread_by_fnmatch(glob):
    """Whether a set begins with backward ranges and "!": fnmatch drops the ranges and takes the set for a negation."""
    found = re.finditer(r"(?=\[((?:.-.)+)!)", glob)
    return any(all(part[0] > part[2] for part in re.findall(".-.", ranges[1])) for ranges in found)


def test_a_set_that_begins_with_a_backward_range_is_no_negation():
    assert glob_regex("[[-?!]").fullmatch("!")
    assert not glob_regex("[[-?!]").fullmatch("[")
    assert not glob_regex("[b-a!a]").fullmatch("b")


@given(st.text(alphabet="ab*?[]!^-\\", max_size=7), st.text(alphabet="ab*[]!^-\\", min_size=1, max_size=5))
@settings(max_examples=500, deadline=None)
def test_globs_of_a_single_name_match_as_in_fnmatch(glob, name):
    assume(not is_misread_by_fnmatch(glob))
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
