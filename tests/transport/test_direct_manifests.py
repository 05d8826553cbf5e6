from __future__ import annotations

import logging
import os

from cacheloader.manifest.record import Manifest, ShardInfo
from cacheloader.transport import direct_manifests
from cacheloader.transport.direct_manifests import ManifestFolder


def manifest(name: str) -> Manifest:
    info = ShardInfo(uri=f"s3://b/{name}.tar", size_bytes=1, version="v", num_samples=2)
    return Manifest.build([info], format="webdataset", origin_id="s3://b")


def test_saved_manifest_is_found_by_its_digest(tmp_path):
    saved = manifest("a")
    ManifestFolder(tmp_path / "x" / "y").save(saved)
    found = ManifestFolder(tmp_path / "x" / "y").load(saved.digest)
    assert found is not None
    assert bytes(found.to_bytes()) == bytes(saved.to_bytes())
    assert os.listdir(tmp_path / "x" / "y") == [saved.digest]


def test_unknown_and_damaged_manifests_are_not_found(tmp_path):
    folder = ManifestFolder(tmp_path)
    saved = manifest("a")
    assert folder.load(saved.digest) is None
    for content in (b"", b"CLMANIF1", bytes(manifest("b").to_bytes())):
        (tmp_path / saved.digest).write_bytes(content)
        assert folder.load(saved.digest) is None


def test_manifest_that_the_client_gave_needs_no_file(tmp_path):
    given = manifest("a")
    folder = ManifestFolder(tmp_path / "none", given=given)
    assert folder.load(given.digest) is given
    assert folder.load(manifest("b").digest) is None


def test_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        ManifestFolder(tmp_path / "file" / "folder").save(manifest("a"))
    assert "CACHELOADER_CACHE_DIR" in caplog.text


def test_oldest_manifests_make_room_and_use_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_manifests, "_KEPT", 3)
    folder = ManifestFolder(tmp_path)
    saved = [manifest(str(number)) for number in range(4)]
    for age, one in enumerate(saved[:3]):
        folder.save(one)
        os.utime(tmp_path / one.digest, (1000 + age, 1000 + age))
    folder.save(saved[0])
    folder.save(saved[3])
    assert set(os.listdir(tmp_path)) == {saved[0].digest, saved[2].digest, saved[3].digest}
