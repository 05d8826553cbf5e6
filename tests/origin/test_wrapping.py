from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from cacheloader.errors import ConfigError
from cacheloader.keys import ByteRange
from cacheloader.origin.location import scheme_of
from cacheloader.origin.open import open_origin

if TYPE_CHECKING:
    from pathlib import Path

REMOTE = {
    "abfs", "adl", "arrow_hdfs", "az", "box", "dbfs", "dropbox", "ftp", "gcs", "gdrive", "gist", "github", "gs",
    "hdfs", "hf", "http", "https", "jlab", "jupyter", "lakefs", "memory", "oci", "ocilake", "oss", "pyscript", "root",
    "s3", "s3a", "sftp", "smb", "ssh", "tos", "tosfs", "wandb", "webdav", "webhdfs",
}  # fmt: skip
LOCAL_BY_RULE = {"file", "local"}


async def test_no_protocol_that_reads_through_another_can_be_opened():
    refused = set(fsspec.available_protocols()) - REMOTE - LOCAL_BY_RULE
    assert {"filecache", "simplecache", "zip", "tar", "reference", "generic", "git", "dir", "data"} <= refused
    for protocol in sorted(refused):
        if "_" in protocol:  # which no scheme of a URL has: it is a path
            assert scheme_of(f"{protocol}://x/") == "file"
            continue
        with pytest.raises(ConfigError, match=f"the protocol {protocol} reads through another file system"):
            open_origin(f"{protocol}://x/")
    for protocol in REMOTE & set(fsspec.registry):
        await open_origin(f"{protocol}://x/", engine="fsspec").aclose()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("dir://x/", {"path": "/", "target_protocol": "file"}),
        ("simplecache://x/", {"target_protocol": "file", "cache_storage": "/tmp/cache"}),
        ("filecache:///", {"target_protocol": "file"}),
        ("SimpleCache:///", {"target_protocol": "file"}),
        ("zip://x/", {"fo": "/data/x.zip"}),
        ("memory://x/", {"fo": "/data/x.zip"}),
        ("memory://x/", {"target_protocol": "file"}),
        ("hf://datasets/", {"fs": {"protocol": "file"}}),
        ("memory://x::file:///data/", {}),
    ],
)
def test_options_and_urls_that_lead_elsewhere_are_refused(url: str, options: dict[str, object]):
    with pytest.raises(ConfigError):
        open_origin(url, storage_options=options)


def test_the_engine_fsspec_can_not_be_forced_around_the_rule():
    with pytest.raises(ConfigError, match="reads through another"):
        open_origin("simplecache://x/", storage_options={"engine": "fsspec"})


@pytest.mark.parametrize("wrapped", [LocalFileSystem, DirFileSystem])
async def test_a_class_registered_by_another_package_is_held_to_the_rule_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: type
):
    class Elsewhere(wrapped):  # type: ignore[misc]
        protocol = "elsewhere"

        def __init__(self, **kwargs: object) -> None:
            super().__init__(**kwargs)

    monkeypatch.setitem(known_implementations, "elsewhere", {})
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "elsewhere", Elsewhere)
    (tmp_path / "secret").write_bytes(b"secret")
    origin = open_origin(f"elsewhere://{tmp_path}/", storage_options={})
    with pytest.raises(ConfigError, match="the protocol elsewhere reads through another file system"):
        await origin.stat(f"elsewhere://{tmp_path}/secret")
    with pytest.raises(ConfigError, match="the protocol elsewhere reads through another file system"):
        await origin.read_range(f"elsewhere://{tmp_path}/secret", ByteRange(start=0, stop=6), version="")
    await origin.aclose()


async def test_an_address_of_version_six_is_no_chain():
    await open_origin("http://[::1]:8000/", engine="fsspec").aclose()


async def test_local_files_are_still_read_by_the_engine_fsspec(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"12345")
    origin = open_origin(f"file://{tmp_path}/", engine="fsspec")
    assert (await origin.stat(f"file://{tmp_path}/a")).size_bytes == 5
    await origin.aclose()
