from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ConfigError, EmptyDataset, OriginDenied, OriginNotFound
from cacheloader.formats import registry
from cacheloader.manifest import locate as locating
from cacheloader.manifest.asking import STATS_IN_FLIGHT, PatientOrigin
from cacheloader.manifest.locate import locate, store_of_all
from tests.support.memory_origin import MemoryOrigin

B = "mem://bucket/"


def origin_with(*names: str) -> MemoryOrigin:
    return MemoryOrigin({B + name: name.encode() for name in names})


async def located(origin: MemoryOrigin, *urls: str, shard_format=None, progress=lambda *_: None) -> list[str]:
    shards = await locate(urls, PatientOrigin(origin), shard_format=shard_format, progress=progress)
    for info in shards:
        assert info == await origin.stat(info.uri)
    return [info.uri.removeprefix(B) for info in shards]


async def test_a_brace_pattern_names_its_shards_in_order():
    origin = origin_with("t-000.tar", "t-001.tar", "t-002.tar", "t-003.tar")
    assert await located(origin, B + "t-{002..000}.tar") == ["t-002.tar", "t-001.tar", "t-000.tar"]


async def test_a_list_keeps_its_order_and_a_listing_is_sorted_bytewise():
    origin = origin_with("z.tar", "d/b.tar", "d/a.tar", "d/B.tar", "d/sub/c.tar", "d/é.tar")
    assert await located(origin, B + "z.tar", B + "d/") == [
        "z.tar",
        "d/B.tar",
        "d/a.tar",
        "d/b.tar",
        "d/sub/c.tar",
        "d/é.tar",
    ]


@pytest.mark.parametrize(
    "urls",
    [[B + "t-{0..3}.tar"], [B + "t-0.tar", B + "t-0.tar", B + "t-1.tar", B + "t-2.tar"], [B], [B + "d/", B + "e/"]],
)
async def test_more_shards_than_allowed_are_refused_however_they_are_named(urls):
    origin = origin_with(*(f"t-{number}.tar" for number in range(4)), "d/0.tar", "d/1.tar", "e/0.tar", "e/1.tar")
    with pytest.raises(ConfigError, match=r"more than 3 shards|more shards below mem://bucket/.* than the [0-9]"):
        await locate(urls, PatientOrigin(origin), shard_format=None, progress=lambda *_: None, max_shards=3)
    found = await locate([B + "d/"], PatientOrigin(origin), shard_format=None, progress=lambda *_: None, max_shards=2)
    assert len(found) == 2


async def test_more_globs_than_could_be_compared_with_every_object_are_refused():
    with pytest.raises(ConfigError, match="stand for 1001 globs"):
        await located(origin_with("a.tar"), B + "{0..1000}*.tar")


@pytest.mark.parametrize("url", [B + "d/", B + "d"])
async def test_of_a_directory_only_shards_are_taken(url):
    origin = origin_with(
        "d/a.tar", "d/shards.json", "d/.b.tar", "d/_tmp/c.tar", "d/.nv-meta/d.tar", "d/_e.tar", "d/x/f.TAR", "d2/g.tar"
    )
    assert await located(origin, url) == ["d/a.tar", "d/x/f.TAR"]


async def test_hidden_parts_above_the_directory_do_not_matter():
    assert await located(origin_with("_x/.y/d/a.tar"), B + "_x/.y/d/") == ["_x/.y/d/a.tar"]


async def test_a_bucket_is_a_directory():
    assert await located(origin_with("a.tar", "d/b.tar"), "mem://bucket") == ["a.tar", "d/b.tar"]


async def test_a_name_without_an_ending_is_an_object_if_nothing_lies_below_it():
    origin = origin_with("shard-1", "shard-2")
    shards = await located(origin, B + "shard-{1,2}", shard_format=registry.named("webdataset"))
    assert shards == ["shard-1", "shard-2"]


async def test_globs_take_what_they_match():
    origin = origin_with("train/0.tar", "train/1.tar", "train/x/2.tar", "val/0.tar", "train/shards.json")
    assert await located(origin, B + "train/*.tar") == ["train/0.tar", "train/1.tar"]
    assert await located(origin, B + "*/0.tar") == ["train/0.tar", "val/0.tar"]
    assert await located(origin, B + "{val,train}/?.tar") == ["val/0.tar", "train/0.tar", "train/1.tar"]
    assert await located(origin, B + "**") == ["train/0.tar", "train/1.tar", "train/x/2.tar", "val/0.tar"]


async def test_a_glob_leaves_side_files_out_but_takes_shards_without_an_ending():
    assert await located(origin_with("d/0.tar", "d/shards.json"), B + "d/*") == ["d/0.tar"]
    assert await located(origin_with("d/part-0", "d/part-1"), B + "d/part-*") == ["d/part-0", "d/part-1"]


async def test_globs_in_one_directory_share_its_listing():
    origin = origin_with("d/0.tar", "d/1.tar")
    await located(origin, B + "d/[01].tar", B + "d/0*.tar", B + "d/")
    assert origin.asked["list", B + "d/"] == 1


async def test_a_shard_that_is_named_twice_is_read_twice_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert await located(origin_with("a.tar", "b.tar"), B + "a.tar", B + "{b,a}.tar") == ["a.tar", "b.tar", "a.tar"]
    assert "shards are named more than once and will be read as often: mem://bucket/a.tar 2 times" in caplog.text


async def test_one_missing_shard_of_a_pattern_is_named():
    origin = origin_with("t-0.tar", "t-2.tar")
    with pytest.raises(OriginNotFound, match=r"shard mem://bucket/t-1.tar, one of 3 named, does not exist") as caught:
        await located(origin, B + "t-{0..2}.tar")
    assert caught.value.uri == B + "t-1.tar"


async def test_shards_are_checked_side_by_side_but_not_all_at_once():
    origin = origin_with(*(f"{i:03d}.tar" for i in range(500)))
    steps: list[tuple[str, int, int]] = []
    await located(origin, B + "{000..499}.tar", progress=lambda *step: steps.append(step))
    assert origin.most_in_flight == STATS_IN_FLIGHT
    assert steps[-1] == ("checking shards", 500, 500)


async def test_many_shards_of_one_directory_are_described_by_listing_it(monkeypatch):
    monkeypatch.setattr(locating, "_LIST_FROM", 10)
    origin = origin_with(*(f"d/{i:03d}.tar" for i in range(30)), *(f"e/{i:03d}.tar" for i in range(5)))
    patient = PatientOrigin(origin)
    urls = [B + "d/{029..000}.tar", B + "e/{000..004}.tar"]
    shards = await locate(urls, patient, shard_format=None, progress=lambda *_: None)
    assert [info.uri for info in shards[:2]] == [B + "d/029.tar", B + "d/028.tar"]
    assert len(shards) == 35
    assert sum(times for (verb, _), times in origin.asked.items() if verb == "stat") == 5


@pytest.mark.parametrize("obstacle", ["forbidden", "crowded", "one missing"])
async def test_where_listing_does_not_help_each_shard_is_asked_for(monkeypatch, obstacle):
    monkeypatch.setattr(locating, "_LIST_FROM", 10)
    names = [f"d/{i:03d}.tar" for i in range(10)]
    origin = origin_with(*names[: 9 if obstacle == "one missing" else 10])
    if obstacle == "forbidden":
        origin.fail(OriginDenied("no listing for you"), verb="list")
    if obstacle == "crowded":
        origin.objects.update({B + f"d/other-{i}": b"" for i in range(1000)})
    if obstacle == "one missing":
        with pytest.raises(OriginNotFound, match=r"d/009\.tar"):
            await located(origin, B + "d/{000..009}.tar")
    else:
        assert await located(origin, B + "d/{000..009}.tar") == names


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (B + "d/", r"of 2 objects below mem://bucket/d/ none ends in .tar and has no part below it that starts with"),
        (B + "d/x*.tar", r"of 2 objects below mem://bucket/d/ none matches it"),
        (B + "empty/", r"of 0 objects below mem://bucket/empty/ none ends in .tar"),
        (B + "nothing", r"mem://bucket/nothing is no object, and no directory that holds any"),
    ],
)
async def test_a_url_that_stands_for_nothing_says_what_was_looked_at_and_the_way_out(url, expected):
    origin = origin_with("a.tar", "d/readme.txt", "d/_b.tar")
    with pytest.raises(EmptyDataset, match=expected) as caught:
        await located(origin, B + "a.tar", url)
    assert caught.value.uri == url


async def test_a_bucket_that_does_not_exist_is_not_found():
    for url in ("mem://nowhere/d/", "mem://nowhere/d/*.tar", "mem://nowhere/d"):
        with pytest.raises(OriginNotFound, match="mem://nowhere/d"):
            await located(origin_with("a.tar"), url)


async def test_a_directory_of_compressed_shards_says_to_decompress_them():
    with pytest.raises(ConfigError, match=r"d/a.tar.gz is compressed .* decompress it"):
        await located(origin_with("d/a.tar.gz"), B + "d/")


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ([], "needs at least one URL"),
        (["s3://a/x.tar", "s3://b/y.tar"], "has shards in s3://a/ and s3://b/; keep all"),
        (["s3://a/x.tar", "/data/y.tar"], "has shards in s3://a/ and file:///"),
        (["s3://buck*/x.tar"], "pattern in place of the bucket"),
        (["s3://{a,b}/x.tar"], "has shards in s3://a/ and s3://b/"),
        (["{s3,gs}://a/x.tar"], "has shards in"),
        (["train/x.tar"], "relative"),
        (["s3://a/{x.tar"], "braces"),
        ([""], "relative|empty"),
    ],
)
async def test_urls_that_cannot_be_meant_are_refused_before_any_question(urls, expected):
    origin = origin_with("a.tar")
    with pytest.raises(ConfigError, match=expected):
        await located(origin, *urls)
    assert not origin.asked


async def test_the_signature_of_a_web_url_stays_out_of_the_error():
    origin = MemoryOrigin({}, store="https://host/")
    with pytest.raises(OriginNotFound, match=r"shard https://host/a.tar\?\*\*\*, one of 1 named") as caught:
        await located(origin, "https://host/a.tar?X-Sig=secret")
    assert "secret" not in str(caught.value) + caught.value.uri


def test_a_bucket_that_is_a_pattern_is_refused():
    with pytest.raises(ConfigError, match="pattern in place of the bucket"):
        store_of_all(["s3://bucket-{0..9}/x.tar"])


async def test_paths_and_synonyms_get_the_name_that_the_origin_uses():
    origin = MemoryOrigin({"file:///data/a.tar": b"", "file:///data/b.tar": b""}, store="file:///")
    for url in ("/data/*.tar", "file:///data/", "/data", "/data/{a,b}.tar"):
        assert await located(origin, url) == ["file:///data/a.tar", "file:///data/b.tar"]
    assert store_of_all(["s3://b/a", "s3://b/c"]) == "s3://b/"


names = st.lists(st.text("ab._/", min_size=1, max_size=6).map(lambda name: name + ".tar"), min_size=1, max_size=8)


@given(names)
async def test_a_directory_and_the_glob_of_all_find_the_same_but_for_underscores(names):
    names = [name for name in names if "//" not in "/" + name and "_" not in name]
    origin = origin_with(*(f"d/{name}" for name in names))
    outcomes = []
    for url in (B + "d/", B + "d/**"):
        try:
            outcomes.append(await located(origin, url))
        except EmptyDataset:
            outcomes.append([])
    assert outcomes[0] == outcomes[1]
