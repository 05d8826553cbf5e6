"""What every origin promises, asked of each on a real store."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from cacheloader.errors import OriginChanged, OriginDenied, OriginError, OriginNotFound, OriginShortBody
from cacheloader.keys import ByteRange
from cacheloader.origin.transfer import with_retries
from tests.contract.origin_stores import Folder, GuardedFolder, Memory, S3Bucket, Store, WebFolder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheloader.origin.base import Origin

BODY = random.Random(7).randbytes(300_000)
ODD_KEYS = (
    "plain.tar",
    "deep/er/file.tar",
    "two words.tar",
    "ümläut/日本語.tar",
    "per%20cent%.tar",
    "plus+sign.tar",
    "question?mark.tar",
    "hash#tag.tar",
    "brace{1}[x]*.tar",
    "amp&semi;colon:tilde~'quote\".tar",
)
STORES = (
    "obstore-s3", "s3fs", "obstore-http", "fsspec-http", "obstore-gs", "obstore-az", "mount", "fsspec-file",
    "fsspec-memory", "guarded",
)  # fmt: skip


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Store:
    need = request.getfixturevalue
    match request.param:
        case "obstore-s3":
            return S3Bucket("obstore", need("s3_server"), need("s3"), need("bucket"), need("prefix"))
        case "s3fs":
            return S3Bucket("fsspec", need("s3_server"), need("s3"), need("bucket"), need("prefix"))
        case "obstore-http":
            return WebFolder("obstore", "http", need("nginx"), need("prefix"))
        case "fsspec-http":
            return WebFolder("fsspec", "http", need("nginx"), need("prefix"))
        case "obstore-gs":
            return WebFolder("obstore", "gs", need("nginx"), need("prefix"))
        case "obstore-az":
            return WebFolder("obstore", "az", need("nginx"), need("prefix"))
        case "mount":
            return Folder("mount", need("tmp_path"))
        case "guarded":
            return GuardedFolder(need("tmp_path"))
        case "fsspec-file":
            return Folder("fsspec", need("tmp_path"))
        case _:
            return Memory()


@pytest.fixture
async def origin(store: Store) -> AsyncIterator[Origin]:
    origin = store.origin()
    yield origin
    await origin.aclose()


async def listed(origin: Origin, prefix: str) -> dict[str, int]:
    return {info.uri: info.size_bytes async for info in origin.list(prefix)}


async def test_stat_tells_size_and_version_and_the_uri_it_was_asked_for(store: Store, origin: Origin):
    store.put("object", BODY)
    info = await origin.stat(store.uri("object"))
    assert (info.uri, info.size_bytes) == (store.uri("object"), len(BODY))
    assert info.version
    assert await origin.stat(store.uri("object")) == info


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 1), (0, 10), (1, 2), (len(BODY) - 1, len(BODY)), (100, 65_636), (0, len(BODY))],
)
async def test_a_range_gives_exactly_its_bytes(store: Store, origin: Origin, start: int, stop: int):
    store.put("object", BODY)
    info = await origin.stat(store.uri("object"))
    body = await origin.read_range(info.uri, ByteRange(start=start, stop=stop), version=info.version)
    assert bytes(body) == BODY[start:stop]
    assert memoryview(body).contiguous


async def test_any_version_may_be_read_without_naming_one(store: Store, origin: Origin):
    store.put("object", BODY)
    assert bytes(await origin.read_range(store.uri("object"), ByteRange(start=3, stop=9), version="")) == BODY[3:9]


async def test_an_empty_range_is_empty_and_still_checks_the_version(store: Store, origin: Origin):
    store.put("object", BODY)
    info, nothing = await origin.stat(store.uri("object")), ByteRange(start=5, stop=5)
    assert bytes(await origin.read_range(info.uri, nothing, version=info.version)) == b""
    store.put("object", BODY + b"more")
    with pytest.raises(OriginChanged):
        await origin.read_range(info.uri, nothing, version=info.version)


async def test_an_object_of_no_bytes_can_be_described_and_read(store: Store, origin: Origin):
    store.put("empty", b"")
    info = await origin.stat(store.uri("empty"))
    assert info.size_bytes == 0
    assert bytes(await origin.read_range(info.uri, ByteRange(start=0, stop=0), version=info.version)) == b""


async def test_an_overwritten_object_is_never_read_under_the_old_version(store: Store, origin: Origin):
    store.put("object", BODY)
    old = await origin.stat(store.uri("object"))
    store.put("object", BODY[::-1] + b"!")
    with pytest.raises(OriginChanged, match="modified") as raised:
        await origin.read_range(old.uri, ByteRange(start=0, stop=100), version=old.version)
    assert not raised.value.retryable
    # nginx promises to keep the connection behind a 412 and closes it.
    new = await with_retries(lambda: origin.stat(old.uri), action="describing", uri=old.uri)
    assert new.version != old.version
    body = await origin.read_range(new.uri, ByteRange(start=0, stop=100), version=new.version)
    assert bytes(body) == BODY[::-1][:100]


@pytest.mark.parametrize(("start", "stop"), [(len(BODY) - 5, len(BODY) + 5), (len(BODY) + 10, len(BODY) + 20)])
async def test_a_range_beyond_the_end_is_a_short_body(store: Store, origin: Origin, start: int, stop: int):
    store.put("object", BODY)
    info = await origin.stat(store.uri("object"))
    with pytest.raises(OriginShortBody):
        await origin.read_range(info.uri, ByteRange(start=start, stop=stop), version=info.version)


async def test_what_is_not_there_is_not_found(store: Store, origin: Origin):
    store.put("object", BODY)
    missing = store.uri("missing")
    with pytest.raises(OriginNotFound, match="missing") as raised:
        await origin.stat(missing)
    assert raised.value.uri == missing
    with pytest.raises(OriginNotFound, match=r"bytes \[0, 5\) of .*missing"):
        await origin.read_range(missing, ByteRange(start=0, stop=5), version="")


async def test_list_finds_everything_below_a_directory_and_nothing_else(store: Store, origin: Origin):
    store.put("train/a.tar", b"a")
    store.put("train/b.tar", b"bb")
    store.put("train/deep/c.tar", b"ccc")
    store.put("train-2/d.tar", b"dddd")
    store.put("trainer", b"e")
    if not store.can_list:
        with pytest.raises(OriginError, match="listing"):
            await listed(origin, store.uri("train/"))
        return
    found = {store.uri("train/a.tar"): 1, store.uri("train/b.tar"): 2, store.uri("train/deep/c.tar"): 3}
    assert await listed(origin, store.uri("train/")) == found


async def test_list_and_stat_agree_on_size_and_version(store: Store, origin: Origin):
    store.put("train/a.tar", BODY)
    if store.can_list:
        infos = [info async for info in origin.list(store.uri("train/"))]
        assert infos == [await origin.stat(store.uri("train/a.tar"))]


async def test_a_directory_without_objects_lists_nothing_or_is_not_found(store: Store, origin: Origin):
    store.put("train/a.tar", b"a")
    if not store.can_list:
        return
    if store.knows_directories:
        with pytest.raises(OriginNotFound):
            await listed(origin, store.uri("test/"))
    else:
        assert await listed(origin, store.uri("test/")) == {}


@pytest.mark.timeout(300)  # a store takes a thousand objects in seconds, and in minutes on a busy machine
async def test_more_objects_than_one_page_are_all_listed(store: Store, origin: Origin):
    if not store.can_list:
        return
    num_objects = 1100 if isinstance(store, S3Bucket) else 200
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"many/{number:05d}", b"x"), range(num_objects)))
    assert len(await listed(origin, store.uri("many/"))) == num_objects


@pytest.mark.parametrize("key", ODD_KEYS)
async def test_odd_keys_are_taken_literally(store: Store, origin: Origin, key: str):
    store.put(f"odd/{key}", key.encode())
    uri = store.uri(f"odd/{key}")
    info = await origin.stat(uri)
    body = await origin.read_range(uri, ByteRange(start=0, stop=info.size_bytes), version=info.version)
    assert bytes(body) == key.encode()
    if store.can_list:
        assert await listed(origin, store.uri("odd/")) == {uri: len(key.encode())}


async def test_missing_rights_are_named_and_never_retried(store: Store):
    denied = store.denied()
    if denied is None:
        pytest.skip("this store knows no rights; the mount has a test of its own")
    origin, uri = denied
    for call in (origin.stat(uri), origin.read_range(uri, ByteRange(start=0, stop=5), version="")):
        with pytest.raises(OriginDenied, match="credentials") as raised:
            await call
        assert not raised.value.retryable
        assert "not-the-secret" not in str(raised.value)
    await origin.aclose()


async def test_a_bucket_that_does_not_exist_is_not_found(store: Store):
    missing = store.missing_store()
    if missing is None:
        pytest.skip("this store has no buckets")
    origin, uri = missing
    with pytest.raises(OriginNotFound):
        await origin.stat(uri)
    with pytest.raises(OriginNotFound, match="bucket"):
        await listed(origin, uri.rpartition("/")[0] + "/")
    await origin.aclose()


async def test_a_cancelled_read_leaves_a_working_origin(store: Store, origin: Origin):
    store.put("object", BODY)
    info = await origin.stat(store.uri("object"))
    whole = ByteRange(start=0, stop=len(BODY))
    for turns in range(5):
        tasks = [asyncio.ensure_future(origin.read_range(info.uri, whole, version=info.version)) for _ in range(4)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert bytes(await origin.read_range(info.uri, whole, version=info.version)) == BODY


async def test_many_reads_at_once_do_not_mix_their_bytes(store: Store, origin: Origin):
    store.put("object", BODY)
    info = await origin.stat(store.uri("object"))
    chance = random.Random(3)
    edges = [sorted(chance.sample(range(len(BODY)), 2)) for _ in range(40)]
    bodies = await asyncio.gather(
        *(origin.read_range(info.uri, ByteRange(start=a, stop=b), version=info.version) for a, b in edges)
    )
    assert [bytes(body) for body in bodies] == [BODY[a:b] for a, b in edges]


async def test_the_identity_is_the_same_for_the_same_store_and_holds_no_secret(store: Store, origin: Origin):
    other = store.origin()
    assert origin.origin_id == other.origin_id
    assert "SKTEST" not in origin.origin_id
    await other.aclose()


async def test_closing_twice_and_closing_unused_does_nothing(store: Store):
    unused = store.origin()
    await unused.aclose()
    used = store.origin()
    store.put("object", BODY)
    await used.stat(store.uri("object"))
    await used.aclose()
    await used.aclose()
