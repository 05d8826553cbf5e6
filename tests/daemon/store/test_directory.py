from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest
from cacheloader_daemon.lock import DirectoryLock
from cacheloader_daemon.store import Store
from cacheloader_daemon.store.directory import MARKER, file_system_of, is_network

from cacheloader.errors import CacheUnusable
from tests.daemon.store.disks import fill, mounted

if TYPE_CHECKING:
    from pathlib import Path


def open_and_close(directory: Path) -> None:
    Store.open(directory).close()


def test_a_missing_directory_is_made_for_us_alone(tmp_path: Path) -> None:
    open_and_close(tmp_path / "some" / "where" / "cache")
    assert stat.S_IMODE((tmp_path / "some" / "where" / "cache").stat().st_mode) == 0o700


def test_an_empty_directory_with_loose_modes_becomes_ours_alone(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    open_and_close(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_directory_with_foreign_files_is_refused_and_left_alone(directory: Path) -> None:
    directory.mkdir()
    (directory / "thesis.tex").write_text("three years of work")
    with pytest.raises(CacheUnusable, match=r"not made by cacheloader \(it holds 'thesis.tex'\).*local disk"):
        open_and_close(directory)
    assert [path.name for path in directory.iterdir()] == ["thesis.tex"]


def test_lock_log_and_socket_of_the_daemon_and_an_empty_file_system_are_no_foreign_files(directory: Path) -> None:
    directory.mkdir()
    for name in ("daemon.lock", "daemon.log", "launch.lock", "lost+found"):
        (directory / name).write_bytes(b"")
    open_and_close(directory)


def test_a_cache_of_another_layout_is_refused(directory: Path) -> None:
    open_and_close(directory)
    (directory / MARKER).write_text('{"format": 99, "note": ""}')
    with pytest.raises(CacheUnusable, match="layout 99, this one has 1"):
        open_and_close(directory)


def test_a_marker_that_cannot_be_read_is_refused(directory: Path) -> None:
    open_and_close(directory)
    (directory / MARKER).write_text("nonsense")
    with pytest.raises(CacheUnusable, match="marker file 'cacheloader-cache' that cannot be read"):
        open_and_close(directory)


def test_a_file_in_the_place_of_the_directory_is_refused(directory: Path) -> None:
    directory.write_bytes(b"")
    with pytest.raises(CacheUnusable, match="File exists"):
        open_and_close(directory)


def test_a_path_below_a_file_is_refused(directory: Path) -> None:
    directory.write_bytes(b"")
    with pytest.raises(CacheUnusable, match=r"cannot be made or opened: File exists; name a directory"):
        open_and_close(directory / "cache")


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m,ro"), pytest.raises(CacheUnusable, match="Read-only file system"):
        open_and_close(tmp_path / "disk")


def test_a_link_in_the_place_of_a_folder_is_not_followed(directory: Path, tmp_path: Path) -> None:
    open_and_close(directory)
    (directory / "manifests").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_bytes(b"")
    (directory / "manifests").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheUnusable):
        open_and_close(directory)
    assert (tmp_path / "elsewhere" / "precious").exists()


MOUNTS = """\
22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:35 / /mnt/home rw,relatime shared:20 master:1 - nfs4 server:/home rw,vers=4.2
41 22 0:36 / /mnt/bucket rw,nosuid - fuse.gcsfuse bucket rw
"""


@pytest.mark.parametrize(
    ("device", "kind", "network"),
    [((253, 0), "ext4", False), ((0, 35), "nfs4", True), ((0, 36), "fuse.gcsfuse", True), ((9, 9), "", False)],
)
def test_network_file_systems_are_told_by_the_mount_table(device: tuple[int, int], kind: str, network: bool) -> None:
    import os

    assert file_system_of(os.makedev(*device), MOUNTS) == kind
    assert is_network(kind) == network


def test_a_directory_on_a_network_file_system_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheloader_daemon.store.directory.file_system_of", lambda device, mountinfo: "nfs4")
    with pytest.raises(CacheUnusable, match=r"network file system \(nfs4\)"):
        open_and_close(directory)


def test_a_path_that_is_too_long_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(CacheUnusable, match=r"File name too long; name a shorter path \(cache_dir\)") as caught:
        DirectoryLock(tmp_path / ("long/" * 1000))
    assert len(caught.value.message) < 1000


def test_a_full_disk_is_told_as_that_and_not_as_a_lock(tmp_path: Path) -> None:
    """Fault: ENOSPC at the first start. Promise: the message says so, and not that something cannot be locked."""
    with mounted(tmp_path / "disk", "size=64k"):
        fill(tmp_path / "disk")
        with (
            DirectoryLock(tmp_path / "disk" / "cache"),
            pytest.raises(CacheUnusable, match="No space left on device; free some space"),
        ):
            open_and_close(tmp_path / "disk" / "cache")
