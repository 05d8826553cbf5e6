"""The same through a real S3 server, with bytes counted on the way from it."""

import gc
import multiprocessing
import os
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

import cacheloader as cl
from tests.support.counting_proxy import CountingProxy
from tests.support.seaweedfs import storage_options
from tests.support.shard_sets import ShardSet, key_and_digest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture
def url(shard_set: ShardSet, s3: Any, bucket: str, prefix: str) -> str:
    return shard_set.upload(s3, bucket, f"{prefix}train")


def read_as_rank(url: str, options: dict[str, Any], cache_dir: Path, rank: int, answers: Any) -> None:
    dataset = cl.RemoteDataset(
        url,
        storage_options=options,
        cache_dir=cache_dir,
        cache_size="256MiB",
        transform=key_and_digest,
        tail="keep",
        rank=rank,
        world_size=4,
    )
    loader = cl.DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=list)
    answers.put([pair for batch in loader for pair in batch])


@pytest.mark.timeout(400)
def test_four_ranks_with_two_workers_each_read_the_data_set_from_the_store_once(
    shard_set: ShardSet, s3_proxy: CountingProxy, url: str, cache_dir: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(
            target=read_as_rank, args=(url, storage_options(s3_proxy.url), cache_dir, rank, answers), daemon=False
        )
        for rank in range(4)
    ]
    for rank in ranks:
        rank.start()
    delivered = [pair for _ in ranks for pair in answers.get(timeout=300)]
    for rank in ranks:
        rank.join(60)
    assert Counter(delivered) == Counter(shard_set.digests.items())
    read = {path: size for path, size in s3_proxy.body_bytes().items() if path.endswith(".tar")}
    assert sum(read.values()) == shard_set.size_bytes


def test_the_second_epoch_asks_the_store_for_nothing(
    shard_set: ShardSet, s3_proxy: CountingProxy, url: str, cache_dir: Path
) -> None:
    dataset = cl.RemoteDataset(
        url, storage_options=storage_options(s3_proxy.url), cache_dir=cache_dir, cache_size="256MiB", tail="keep"
    )
    loader = cl.DataLoader(dataset, batch_size=32, num_workers=2, collate_fn=len)
    assert sum(loader) == len(shard_set.digests)
    assert s3_proxy.body_bytes().total() >= shard_set.size_bytes
    requests_of_the_first = len(s3_proxy.exchanges)
    assert sum(loader) == len(shard_set.digests)
    assert len(s3_proxy.exchanges) == requests_of_the_first


def test_a_job_on_a_warm_cache_lists_and_reads_nothing_else(
    shard_set: ShardSet, s3_proxy: CountingProxy, url: str, cache_dir: Path
) -> None:
    options = {"storage_options": storage_options(s3_proxy.url), "cache_dir": cache_dir, "cache_size": "256MiB"}
    first = [sample["__key__"] for sample in cl.RemoteDataset(url, **options)]
    before = s3_proxy.body_bytes()
    second = [sample["__key__"] for sample in cl.RemoteDataset(url, **options)]
    assert second == first
    assert len(first) == len(shard_set.digests)
    assert s3_proxy.body_bytes() == before


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset's
@pytest.mark.parametrize("written_by", ["webdataset", "gnu tar"])
def test_shards_are_read_sample_for_sample_as_webdataset_reads_them(
    written_by: str,
    shard_set: ShardSet,
    s3: Any,
    bucket: str,
    prefix: str,
    tmp_path: Path,
    cache_dir: Path,
    s3_server: Any,
) -> None:
    folder = shard_set.folder if written_by == "webdataset" else gnu_tar_shards(tmp_path)
    for path in sorted(folder.glob("*.tar")):
        s3.upload_file(str(path), bucket, f"{prefix}{path.name}")
    ours = cl.RemoteDataset(
        f"s3://{bucket}/{prefix}",
        storage_options=s3_server.storage_options,
        shuffle=False,
        cache_dir=cache_dir,
        cache_size="256MiB",
    )
    theirs = wds.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=False)
    expected = [{k: v for k, v in sample.items() if k not in ("__url__", "__local_path__")} for sample in theirs]
    assert list(ours) == expected
    assert len(expected) > 5
    del theirs
    gc.collect()  # files that webdataset leaves open warn here, where that is no error


def gnu_tar_shards(folder: Path) -> Path:
    """Two shards packed by GNU tar from a tree with dotted, nested, long and upper-case names."""
    import subprocess

    for shard in range(2):
        tree = folder / f"tree{shard}"
        for name in (
            "plain.jpg", "plain.cls", "dotted.name.v2.jpg", "dotted.seg.png", "deep/er/in.jpg", "deep/er/in.json",
            "deep.er/with.dots.txt", "UPPER.JPG", "no_extension", "d" * 90 + "/" + "l" * 120 + ".bin", "ünï.txt",
        ):  # fmt: skip
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(700) + name.encode())
        subprocess.run(
            ["tar", "--sort=name", "-cf", str(folder / f"gnu-{shard}.tar"), "-C", str(tree), "."],
            check=True,
            timeout=30,
        )
    with tarfile.open(folder / "gnu-0.tar") as archive:
        assert any(member.isdir() for member in archive.getmembers())
    return folder
