from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cacheloader.errors import ConfigError, OriginChanged, OriginError
from cacheloader.keys import ByteRange
from cacheloader.origin.conditional import S3FilesystemOrigin, WebFilesystemOrigin
from cacheloader.origin.filesystem import FilesystemOrigin
from cacheloader.origin.mount import MountOrigin
from cacheloader.origin.object_store import ObjectStoreOrigin
from cacheloader.origin.open import open_origin

if TYPE_CHECKING:
    from tests.support.nginx import NginxServer

AZURE = {"account_name": "a"}


@pytest.mark.parametrize(
    ("url", "options", "engine", "kind"),
    [
        ("s3://b/", {}, "auto", ObjectStoreOrigin),
        ("s3a://b/", {}, "auto", ObjectStoreOrigin),
        ("gs://b/", {}, "auto", ObjectStoreOrigin),
        ("az://b/", AZURE, "auto", ObjectStoreOrigin),
        ("abfs://b/", AZURE, "auto", ObjectStoreOrigin),
        ("https://h/", {}, "auto", ObjectStoreOrigin),
        ("https://h/x?sig=1", {}, "auto", WebFilesystemOrigin),
        ("s3://b/", {}, "fsspec", S3FilesystemOrigin),
        ("s3://b/", {"engine": "fsspec"}, "auto", S3FilesystemOrigin),
        ("s3://b/", {"engine": "obstore"}, "fsspec", ObjectStoreOrigin),
        ("https://h/", {}, "fsspec", WebFilesystemOrigin),
        ("memory://x/", {}, "auto", FilesystemOrigin),
        ("/data/", {}, "auto", MountOrigin),
        ("file:///data/", {}, "auto", MountOrigin),
        ("file:///data/", {}, "fsspec", FilesystemOrigin),
    ],
)
async def test_the_engine_follows_the_scheme_and_may_be_forced(
    url: str, options: dict[str, object], engine: str, kind: type
):
    origin = open_origin(url, storage_options=options, engine=engine)
    assert type(origin) is kind
    await origin.aclose()


@pytest.mark.parametrize(
    ("url", "options", "engine", "says"),
    [
        ("s3://b/", {}, "magic", "engine='magic' is unknown; it is one of auto, obstore, fsspec, mount"),
        ("s3://b/", {}, "mount", "engine mount cannot read s3://b/"),
        ("memory://b/", {}, "obstore", "engine obstore cannot read memory://b/"),
        ("file:///data/", {"key": "x"}, "auto", "storage_options key have no meaning for file:///data/"),
        ("nowhere://b/", {}, "auto", "unknown protocol nowhere"),
        ("s3://b/", {"colour": "red"}, "auto", "unknown name 'colour' for s3"),
        ("s3://b/", {"colour": "red"}, "fsspec", "unknown name 'colour' for s3"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_asked(
    url: str, options: dict[str, object], engine: str, says: str
):
    with pytest.raises(ConfigError, match=says):
        open_origin(url, storage_options=options, engine=engine)


async def test_options_that_a_file_system_does_not_know_are_a_config_error():
    origin = open_origin("memory://x/", storage_options={"skip_instance_cache": True})
    with pytest.raises(ConfigError, match="storage options for memory://x/ cannot work"):
        await origin.stat("memory://x/y")


async def test_a_listing_without_sizes_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch):
    found = {"/x/a.tar": {"name": "/x/a.tar", "size": None, "type": "file"}}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: found)
    origin = open_origin("memory://x/")
    with pytest.raises(OriginError, match=r"listing memory://x/a.tar failed: the store does not say its size"):
        [info async for info in origin.list("memory://x/")]
    found["/x/a.tar"]["size"] = "no number"
    with pytest.raises(OriginError, match=r"listing memory://x/a.tar failed"):
        [info async for info in origin.list("memory://x/")]
    await origin.aclose()


async def test_a_url_with_a_query_is_read_whole_and_its_signature_is_never_shown(nginx: NginxServer, prefix: str):
    folder = nginx.root / prefix
    folder.mkdir()
    (folder / "a b.tar").write_bytes(b"12345")
    uri = f"{nginx.url}/{prefix}{quote('a b.tar')}?sig=topsecret"
    origin = open_origin(uri)
    info = await origin.stat(uri)
    assert bytes(await origin.read_range(uri, ByteRange(start=1, stop=3), version=info.version)) == b"23"
    (folder / "a b.tar").write_bytes(b"123456")
    with pytest.raises(OriginChanged) as raised:
        await origin.read_range(uri, ByteRange(start=1, stop=3), version=info.version)
    assert "topsecret" not in f"{raised.value} {raised.value.uri} {raised.value.__cause__} {origin.origin_id}"
    await origin.aclose()


async def test_a_url_with_a_query_is_refused_by_the_engine_that_would_ask_for_another_file(nginx: NginxServer):
    origin = open_origin(f"{nginx.url}/")
    with pytest.raises(OriginError, match=r"no URLs with a query; pass storage_options=.*fsspec") as raised:
        await origin.stat(f"{nginx.url}/x?sig=topsecret")
    assert "topsecret" not in str(raised.value)
    await origin.aclose()


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
async def test_a_web_server_without_entity_tags_is_held_to_time_and_size(nginx: NginxServer, prefix: str, engine: str):
    folder = nginx.root / prefix
    folder.mkdir()
    (folder / "x").write_bytes(b"12345")
    uri = f"{nginx.url}/no-etag/{prefix}x"
    origin = open_origin(uri, engine=engine)
    info = await origin.stat(uri)
    assert info.version
    assert not info.version.startswith('"')
    assert bytes(await origin.read_range(uri, ByteRange(start=0, stop=2), version=info.version)) == b"12"
    (folder / "x").write_bytes(b"123456")
    with pytest.raises(OriginChanged):
        await origin.read_range(uri, ByteRange(start=0, stop=2), version=info.version)
    await origin.aclose()


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
async def test_a_web_server_that_ignores_ranges_never_gives_wrong_bytes(nginx: NginxServer, prefix: str, engine: str):
    folder = nginx.root / prefix
    folder.mkdir()
    (folder / "x").write_bytes(b"12345")
    uri = f"{nginx.url}/no-ranges/{prefix}x"
    origin = open_origin(uri, engine=engine)
    with pytest.raises(OriginError):
        await origin.read_range(uri, ByteRange(start=1, stop=3), version="")
    await origin.aclose()


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
async def test_what_the_server_says_is_told_apart(nginx: NginxServer, engine: str):
    origin = open_origin(nginx.url, engine=engine)
    kinds = {}
    for place in ("denied", "throttled", "broken", "missing"):
        with pytest.raises(OriginError) as raised:
            await origin.read_range(f"{nginx.url}/{place}/x", ByteRange(start=0, stop=1), version="")
        kinds[place] = (type(raised.value).__name__, raised.value.retryable)
    assert kinds == {
        "denied": ("OriginDenied", False),
        "throttled": ("OriginThrottled", True),
        "broken": ("OriginUnavailable", True),
        "missing": ("OriginNotFound", False),
    }
    await origin.aclose()


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize("host", ["127.0.0.1:1", "host.invalid"])
async def test_a_server_that_cannot_be_reached_is_unavailable(engine: str, host: str):
    origin = open_origin(f"http://{host}/", engine=engine)
    with pytest.raises(OriginError) as raised:
        await origin.stat(f"http://{host}/x")
    assert type(raised.value).__name__ == "OriginUnavailable"
    assert raised.value.retryable
    await origin.aclose()
