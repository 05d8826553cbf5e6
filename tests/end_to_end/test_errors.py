"""What a user sees who got something wrong: one sentence, within seconds, and never a hang."""

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import cacheloader as cl
from cacheloader.errors import (
    CacheUnusable,
    ConfigError,
    CorruptShard,
    EmptyDataset,
    OriginDenied,
    OriginNotFound,
    QuotaTooSmall,
)
from tests.support.seaweedfs import storage_options
from tests.support.shard_sets import ShardSet

LIMIT_S = 60.0
"""Users are promised 10 s; a machine that runs other tests meanwhile, or pauses, gets more. What does not keep to the
limits of an inquiry has those of a transfer, which are minutes."""


@pytest.fixture(autouse=True)
def soon() -> Any:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < LIMIT_S


def is_one_sentence(error: BaseException) -> bool:
    text = str(error)
    return "\n" not in text and len(text) < 900 and not re.search(r"Traceback|<class|object at 0x", text)


def open_s3(url: str, options: dict[str, Any], cache_dir: Path, **more: Any) -> cl.RemoteDataset:
    return cl.RemoteDataset(url, storage_options=options, cache_dir=cache_dir, cache_size="64MiB", **more)


def test_a_bucket_that_does_not_exist(s3_server: Any, cache_dir: Path) -> None:
    with pytest.raises(OriginNotFound, match="no-such-bucket") as caught:
        open_s3("s3://no-such-bucket/train-{000..003}.tar", s3_server.storage_options, cache_dir)
    assert is_one_sentence(caught.value)


def test_one_missing_shard_of_a_pattern_is_named(
    shard_set: ShardSet, s3: Any, bucket: str, prefix: str, s3_server: Any, cache_dir: Path
) -> None:
    shard_set.upload(s3, bucket, prefix.rstrip("/"))
    with pytest.raises(OriginNotFound, match=r"shard-000016\.tar") as caught:
        open_s3(f"s3://{bucket}/{prefix}shard-{{000000..000016}}.tar", s3_server.storage_options, cache_dir)
    assert is_one_sentence(caught.value)


def test_wrong_credentials(bucket: str, s3_server: Any, cache_dir: Path) -> None:
    options = storage_options(s3_server.endpoint_url, secret="wrong-secret-000")
    with pytest.raises(OriginDenied, match=bucket) as caught:
        open_s3(f"s3://{bucket}/train/", options, cache_dir)
    assert is_one_sentence(caught.value)
    assert "wrong-secret-000" not in str(caught.value)


def test_an_empty_prefix(bucket: str, prefix: str, s3_server: Any, cache_dir: Path) -> None:
    with pytest.raises((EmptyDataset, OriginNotFound), match=prefix) as caught:
        open_s3(f"s3://{bucket}/{prefix}", s3_server.storage_options, cache_dir)
    assert is_one_sentence(caught.value)


def test_a_server_that_is_not_there(cache_dir: Path) -> None:
    with pytest.raises(cl.errors.OriginError, match=r"127\.0\.0\.1:9") as caught:
        open_s3("s3://bucket/train/", storage_options("http://127.0.0.1:9"), cache_dir)
    assert is_one_sentence(caught.value)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_truncated_tar_with_its_count_beside_it_fails_in_the_loop_and_names_the_shard(
    shard_set: ShardSet, tmp_path: Path, cache_dir: Path, num_workers: int
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    shutil.copy(shard_set.paths[0], folder / "a.tar")
    (folder / "b.tar").write_bytes(shard_set.paths[1].read_bytes()[:100_000])
    (folder / "shards.json").write_text('{"a.tar": 64, "b.tar": 64}')
    dataset = cl.RemoteDataset(str(folder), cache_dir=cache_dir, cache_size="64MiB")
    loader = cl.DataLoader(dataset, batch_size=8, num_workers=num_workers, collate_fn=list)
    with pytest.raises(CorruptShard, match=r"b\.tar"):
        list(loader)


def test_a_truncated_tar_without_counts_fails_at_construction(
    shard_set: ShardSet, tmp_path: Path, cache_dir: Path
) -> None:
    (tmp_path / "b.tar").write_bytes(shard_set.paths[1].read_bytes()[:100_000])
    with pytest.raises(CorruptShard, match=r"b\.tar") as caught:
        cl.RemoteDataset(str(tmp_path / "b.tar"), cache_dir=cache_dir, cache_size="64MiB")
    assert is_one_sentence(caught.value)


def test_a_wrong_count_beside_the_shards_is_found(shard_set: ShardSet, tmp_path: Path, cache_dir: Path) -> None:
    shutil.copy(shard_set.paths[0], tmp_path / "a.tar")
    (tmp_path / "shards.json").write_text('{"a.tar": 63}')
    with pytest.raises(cl.errors.DatasetError, match=r"a\.tar.*6[34].*6[34].*shards\.json"):
        list(cl.RemoteDataset(str(tmp_path), cache_dir=cache_dir, cache_size="64MiB"))


def test_a_quota_below_one_window_shows_the_arithmetic(shard_set: ShardSet, cache_dir: Path) -> None:
    dataset = cl.RemoteDataset(str(shard_set.folder), cache_dir=cache_dir, cache_size="8MiB", shuffle_window=8)
    with pytest.raises(QuotaTooSmall, match=r"8\.0 MiB.*cache_size of at least \d+") as caught:
        next(iter(dataset))
    assert is_one_sentence(caught.value)


def test_a_cache_directory_that_cannot_be_made(shard_set: ShardSet, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CacheUnusable, match="file") as caught:
        cl.RemoteDataset(str(shard_set.folder), cache_dir=tmp_path / "file" / "cache", cache_size="64MiB")
    assert is_one_sentence(caught.value)


def test_a_cache_directory_on_a_read_only_file_system(shard_set: ShardSet) -> None:
    with pytest.raises(CacheUnusable, match="/proc/cacheloader") as caught:
        cl.RemoteDataset(str(shard_set.folder), cache_dir="/proc/cacheloader", cache_size="64MiB")
    assert is_one_sentence(caught.value)


def test_a_folder_with_other_files_is_not_taken_as_a_cache(shard_set: ShardSet, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("do not delete")
    with pytest.raises(CacheUnusable, match=re.escape(str(tmp_path))):
        cl.RemoteDataset(str(shard_set.folder), cache_dir=tmp_path, cache_size="64MiB")
    assert (tmp_path / "thesis.tex").read_text() == "do not delete"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tail": "wrap"}, "tail='wrap'"),
        ({"transform": 3}, "transform=3 cannot be called"),
        ({"shuffle_window": 0}, "shuffle_window=0"),
        ({"lanes": 0}, "lanes=0"),
        ({"cache_size": "many"}, "cache_size='many'"),
        ({"daemon": "tcp://x"}, "daemon='tcp://x'"),
        ({"rank": 0}, "both or neither"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"format": "zip"}, "format='zip'"),
        ({"storage_options": {"endpont_url": "x"}}, "endpont_url"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_an_option_that_cannot_work_is_named_with_its_value(
    shard_set: ShardSet, cache_dir: Path, options: dict[str, Any], text: str
) -> None:
    arguments = {"cache_dir": cache_dir, "cache_size": "64MiB"} | options
    url = "s3://bucket/x/" if "storage_options" in options else str(shard_set.folder)
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        cl.RemoteDataset(url, **arguments)
    assert is_one_sentence(caught.value)


def test_half_a_world_in_the_environment_is_refused(
    shard_set: ShardSet, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="RANK='1' and WORLD_SIZE=None"):
        cl.RemoteDataset(str(shard_set.folder), cache_dir=cache_dir)


def test_an_unknown_batch_size_is_refused_where_the_order_depends_on_it(shard_set: ShardSet, cache_dir: Path) -> None:
    dataset = cl.RemoteDataset(
        str(shard_set.folder), cache_dir=cache_dir, cache_size="64MiB", rank=0, world_size=2, shuffle_window=2
    )
    with pytest.raises(ConfigError, match="batch_size"):
        next(iter(dataset))


@pytest.mark.parametrize("name", ["shuffle", "sampler", "batch_sampler", "drop_last"])
def test_loader_options_that_would_change_the_order_are_refused(
    shard_set: ShardSet, cache_dir: Path, name: str
) -> None:
    dataset = cl.RemoteDataset(str(shard_set.folder), cache_dir=cache_dir, cache_size="64MiB")
    with pytest.raises(ConfigError, match=name):
        cl.DataLoader(dataset, batch_size=8, **{name: [1]})


def test_a_global_batch_that_the_lanes_cannot_share_says_which_sizes_work(shard_set: ShardSet, cache_dir: Path) -> None:
    dataset = cl.RemoteDataset(str(shard_set.folder), cache_dir=cache_dir, cache_size="64MiB", lanes=4)
    with pytest.raises(ConfigError, match="8 or 12"):
        cl.DataLoader(dataset, batch_size=10)


@pytest.mark.parametrize(("urls", "text"), [("", "a URL is empty"), ([""], "a URL is empty"), (None, "urls is None")])
def test_an_unset_variable_is_not_the_working_directory(
    shard_set: ShardSet, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, urls: Any, text: str
) -> None:
    monkeypatch.chdir(shard_set.folder)
    with pytest.raises(ConfigError, match=text) as caught:
        cl.RemoteDataset(urls, cache_dir=cache_dir, cache_size="64MiB")
    assert is_one_sentence(caught.value)


def test_what_is_no_position_and_what_are_no_sources_is_said(shard_set: ShardSet, cache_dir: Path) -> None:
    dataset = cl.RemoteDataset(str(shard_set.folder), cache_dir=cache_dir, cache_size="64MiB")
    with pytest.raises(cl.errors.StateMismatch, match=r"this is None; pass what state_dict\(\) gave"):
        cl.DataLoader(dataset, batch_size=8).load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="are list; pass a dict"):
        cl.Mixture([dataset])  # type: ignore[arg-type]
