"""The same data set from a folder, from S3 and over HTTP; the scan's reads against samples that were packed."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager

import numpy as np
import pytest

from cacheloader.errors import ConfigError, EmptyDataset, OriginDenied, OriginError, OriginNotFound
from cacheloader.formats.base import index_samples
from cacheloader.formats.registry import named
from cacheloader.manifest.asking import FAMILIAR, PatientOrigin
from cacheloader.manifest.resolve import resolve
from cacheloader.manifest.scan import ScanCounter
from cacheloader.manifest.sidecar import sidecar_text, write_sidecar
from cacheloader.origin.open import open_origin
from cacheloader.protocol.messages import DatasetSpec
from tests.support.buffers import BufferSource
from tests.support.shard_sets import digest, write_shards

FORMAT = named("webdataset")
COUNTS = [25, 25, 25, 25]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Real stores on a busy machine are silent for longer, now and then, than a stranger is waited for."""
    monkeypatch.setitem(PatientOrigin.__init__.__kwdefaults__, "stranger", FAMILIAR)


@pytest.fixture(scope="module")
def shard_set(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), num_shards=4, samples_per_shard=25)


@asynccontextmanager
async def opened(url, options=None):
    origin = open_origin(url, storage_options=options)
    try:
        yield origin
    finally:
        await origin.aclose()


async def resolved(url, options=None):
    async with opened(url, options) as origin:
        return await resolve(DatasetSpec(urls=[url]), origin, ScanCounter(origin, FORMAT))


@pytest.mark.parametrize("pattern", ["", "/", "/*.tar", "/shard-{000000..000003}.tar"])
async def test_a_folder_resolves_however_it_is_named(shard_set, pattern):
    manifest = await resolved(f"file://{shard_set.folder}{pattern}")
    assert manifest.num_samples.tolist() == COUNTS
    assert [manifest.uri(i) for i in range(4)] == [f"file://{path}" for path in shard_set.paths]
    assert manifest.size_bytes.tolist() == [path.stat().st_size for path in shard_set.paths]


async def test_an_s3_prefix_resolves_however_it_is_named_and_its_samples_are_those_that_were_packed(
    shard_set, s3_server, s3, bucket, prefix
):
    url = shard_set.upload(s3, bucket, prefix.rstrip("/"))
    options = s3_server.storage_options
    manifests = [
        await resolved(url + pattern, options)
        for pattern in ("", "*.tar", "shard-{000000..000003}.tar", "shard-00000[0-3].tar")
    ]
    assert len({manifest.digest for manifest in manifests}) == 1
    manifest = manifests[0]
    assert manifest.num_samples.tolist() == COUNTS
    digests = {}
    async with opened(url, options) as origin:
        for shard in map(manifest.shard, range(4)):
            store = PatientOrigin(origin)
            body = await store.read(await store.stat(shard.uri), 0, shard.size_bytes)
            index = FORMAT.build_index(BufferSource(body), uri=shard.uri)
            assert index_samples(index) == shard.num_samples
            reader = FORMAT.open(BufferSource(body), index, uri=shard.uri)
            digests |= {sample["__key__"]: digest(sample) for sample in reader.read(np.arange(shard.num_samples))}
    assert digests == shard_set.digests


async def test_counts_beside_the_shards_of_a_bucket_spare_reading_them(shard_set, s3_server, s3, bucket, prefix):
    url = shard_set.upload(s3, bucket, prefix.rstrip("/"))
    scanned = await resolved(url, s3_server.storage_options)
    text = sidecar_text(scanned, directory=url)
    s3.put_object(Bucket=bucket, Key=f"{prefix}shards.json", Body=text.encode())

    class Refusing:
        async def count(self, shards, *, progress):
            raise AssertionError(f"asked to count {len(shards)} shards")

    async with opened(url, s3_server.storage_options) as origin:
        manifest = await resolve(DatasetSpec(urls=[url]), origin, Refusing())
    assert manifest.digest == scanned.digest


async def test_counts_written_into_a_folder_are_found_there(tmp_path):
    shards = write_shards(tmp_path, num_shards=2, samples_per_shard=3)
    manifest = await resolved(f"file://{tmp_path}/")
    write_sidecar(manifest, shards.folder / "shards.json", directory=f"file://{tmp_path}/")
    assert (await resolved(f"file://{tmp_path}/")).digest == manifest.digest


async def test_wrong_urls_and_keys_are_told_apart_in_a_bucket(s3_server, s3, bucket, prefix):
    options = s3_server.storage_options
    s3.put_object(Bucket=bucket, Key=f"{prefix}readme.txt", Body=b"-")
    s3.put_object(Bucket=bucket, Key=f"{prefix}_a-0.tar", Body=b"-")
    with pytest.raises(EmptyDataset, match=r"of 2 objects below .* none ends in \.tar"):
        await resolved(f"s3://{bucket}/{prefix}", options)
    with pytest.raises(EmptyDataset, match="is no object, and no directory that holds any"):
        await resolved(f"s3://{bucket}/{prefix}nothing", options)
    with pytest.raises(OriginNotFound, match=r"a-1\.tar, one of 2 named, does not exist"):
        await resolved(f"s3://{bucket}/{prefix}_a-{{0..1}}.tar", options)
    with pytest.raises(OriginNotFound, match="no-such-bucket"):
        await resolved("s3://no-such-bucket/train/", options)
    with pytest.raises(OriginDenied):
        await resolved(f"s3://{bucket}/{prefix}", options | {"secret": "wrong-secret"})


async def test_shards_on_a_web_server_are_named_by_a_pattern(shard_set, nginx):
    for path in shard_set.paths:
        (nginx.root / path.name).write_bytes(path.read_bytes())
    manifest = await resolved(f"{nginx.url}/shard-{{000000..000003}}.tar")
    assert manifest.num_samples.tolist() == COUNTS
    with pytest.raises(OriginError, match="shard-000004"):
        await resolved(f"{nginx.url}/shard-{{000003..000004}}.tar")


async def test_a_file_whose_name_is_no_unicode_is_refused_with_a_hint(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"-")
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff.tar", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(ConfigError, match=r"\\xff\.tar' is not UTF-8; rename it"):
        await resolved(f"file://{tmp_path}/")


async def test_a_missing_folder_is_not_found(tmp_path):
    for pattern in ("/none", "/none/", "/none/*.tar", "/none.tar"):
        with pytest.raises(OriginNotFound, match="none"):
            await resolved(f"file://{tmp_path}{pattern}")
