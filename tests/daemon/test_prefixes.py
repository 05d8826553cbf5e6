"""URL prefixes: no other spelling of a URL gets around them."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from cacheloader_daemon.prefixes import UrlPrefixes, readings
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ConfigError

TEAM = UrlPrefixes(
    allow=("s3://team/", "http://data.example:8080/public/", "https://data.example/", "/mnt/team/"),
    deny=("s3://team/private/", "https://data.example/private/"),
)


@pytest.mark.parametrize(
    "url",
    [
        "s3://team/a.tar",
        "s3a://team/a.tar",
        "s3://team/",
        "s3://team/privateer/a.tar",
        "s3://team/hour=2020%3A00/a.tar",
        "http://DATA.example:8080/public/a.tar",
        "http://data.example.:8080/public/a.tar",
        "https://data.example:443/a.tar?signature=..%2f..",
        "file:///mnt/team/a.tar",
        "local:///mnt/team/a.tar",
        "/mnt/team/a.tar",
    ],
)
def test_what_lies_below_an_allowed_prefix_is_covered_in_any_usual_spelling(url: str) -> None:
    assert TEAM.cover(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://team-b/a.tar",
        "s3://other/team/a.tar",
        "s3://team/private/a.tar",
        "s3://team/private",
        "s3://team/%70rivate/a.tar",
        "s3://team/%2570rivate/a.tar",
        "s3://team/private%2fa.tar",
        "gs://team/a.tar",
        "http://data.example/public/a.tar",
        "http://data.example:8081/public/a.tar",
        "http://data.example:8080/publicity/a.tar",
        "http://data.example:8080/%2570ublic/a.tar",
        "https://data.example/private/a.tar",
        "https://data.example/private?x=1",
        "https://data.example/%70%72%69%76ate/a.tar#f",
        "https://data.example.evil/a.tar",
        "file:///mnt/team-b/a.tar",
        "/etc/shadow",
    ],
)
def test_what_lies_elsewhere_or_is_denied_is_not(url: str) -> None:
    assert not TEAM.cover(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://team/../other/a.tar",
        "s3://team/x/%2e%2e/private/a.tar",
        "s3://team/x/.%2E/private/a.tar",
        "s3://team/x/%252e%252e/private/a.tar",
        "s3://team//private/a.tar",
        "s3://team/./private/a.tar",
        "s3://Team/a.tar",
        "https://user@data.example/a.tar",
        "https://data.example@evil.example/a.tar",
        "https://data.example\\@evil.example/a.tar",
        "https://data.example/x\\..\\private/a.tar",
        "https://data.example/pri\tvate/a.tar",
        "https://data.example/pri%0avate/a.tar",
        "https://data.ｅxample/a.tar",
        "https://data%2eexample/a.tar",
        "file://mnt/team/a.tar",
        "/mnt/team/../other/a.tar",
        "/mnt/team/x/%2e%2e/a.tar",
    ],
)
def test_what_may_mean_two_places_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="may mean more than one place"):
        TEAM.cover(url)


@pytest.mark.parametrize("text", ["team/", "s3://team/%41/", "s3://team/../x/", "s3://team//x/", ""])
def test_a_prefix_that_could_mean_several_places_is_refused_in_the_configuration(text: str) -> None:
    with pytest.raises(ConfigError):
        UrlPrefixes(allow=(text,))


def test_nothing_is_covered_unless_it_is_allowed() -> None:
    assert not UrlPrefixes().cover("s3://team/a.tar")
    assert not UrlPrefixes(deny=("s3://other/",)).cover("s3://team/a.tar")
    assert UrlPrefixes(allow=("s3://",)).cover("s3://team/a.tar")
    assert not UrlPrefixes(allow=("s3://",)).cover("http://team/a.tar")
    assert UrlPrefixes(allow=("/",)).cover("/etc/hosts")


_PARTS = st.sampled_from(
    ["private", "a", "..", ".", "", "%2e%2e", "%2E.", "%70rivate", "%252e", "pri\\", "x%2fy", "Ａ"]
)


@given(st.lists(_PARTS, min_size=1, max_size=6), st.sampled_from(["s3://team/", "https://data.example/", "/mnt/team/"]))
def test_whatever_is_covered_stays_below_the_prefix_however_it_is_resolved(parts: list[str], root: str) -> None:
    from pathlib import PurePosixPath
    from posixpath import normpath
    from urllib.parse import unquote

    url = root + "/".join(parts)
    try:
        covered = TEAM.cover(url)
    except ConfigError:
        return
    if not covered:
        return
    path = "/".join(parts)
    for _ in range(4):
        resolved = PurePosixPath(normpath(f"/root/{path}"))
        assert resolved.is_relative_to("/root")
        assert root == "/mnt/team/" or not resolved.is_relative_to("/root/private")
        path = unquote(path)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_any_text_is_covered_refused_or_neither_and_never_an_accident(text: str) -> None:
    for url in (text, f"s3://team/{text}", f"https://{text}", f"https://data.example/{quote(text)}"):
        try:
            assert TEAM.cover(url) in {True, False}
            assert readings(url)
        except ConfigError:
            pass
