"""One contract for all places where checkpoints lie."""

from __future__ import annotations

import pickle
import socket
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from cacheloader.checkpoint.commit import COMMIT_FILE
from cacheloader.checkpoint.store import FolderStore, FsspecStore, open_store
from cacheloader.errors import ConfigError, NoValidCheckpoint, SaveFailed
from tests.checkpoint.jobs import Job
from tests.support.counting_proxy import CountingProxy
from tests.support.seaweedfs import storage_options

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "folder":
        return open_store(tmp_path / "root")
    if request.param == "memory":
        return open_store(f"memory://{uuid.uuid4().hex}")
    server = request.getfixturevalue("s3_server")
    bucket, prefix = request.getfixturevalue("bucket"), request.getfixturevalue("prefix")
    return open_store(f"s3://{bucket}/{prefix}ckpt", storage_options(server.endpoint_url))


def put(store: Any, path: str, data: bytes) -> None:
    with store.writing(path) as stream:
        stream.write(data)


def test_an_absent_root_is_empty(store: Any) -> None:
    assert store.top() == {}
    assert store.files("a") == {}
    with pytest.raises(FileNotFoundError):
        store.reading("a/b").read()


def test_what_was_written_is_there_with_its_size_and_time(store: Any) -> None:
    put(store, "a/x", b"12345")
    put(store, "a/deep/y", b"")
    put(store, "b", b"1")
    assert store.top() == {"a": True, "b": False}
    files = store.files("a")
    assert {name: file.size_bytes for name, file in files.items()} == {"x": 5, "deep/y": 0}
    assert files["x"].modified_s > 1.7e9
    assert store.files("b")[""].size_bytes == 1
    with store.reading("a/x") as stream:
        stream.seek(1)
        assert stream.read(2) == b"23"


def test_a_file_whose_writing_failed_is_not_there(store: Any) -> None:
    def fail() -> None:
        with store.writing("a/x") as stream:
            stream.write(b"x" * 100)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert store.files("a") == {}
    put(store, "a/x", b"new")
    assert store.files("a")["x"].size_bytes == 3


def test_a_folder_is_removed_with_all_that_is_in_it(store: Any) -> None:
    put(store, "a/x", b"1")
    put(store, "a/deep/y", b"2")
    put(store, "ab/z", b"3")
    store.remove("a", first=["x", "not there"])
    store.remove("never was")
    assert store.top() == {"ab": True}


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    put(store, "b/x", b"1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / COMMIT_FILE).touch()
    (tmp_path / "root" / "a").symlink_to(tmp_path / "elsewhere")
    store.remove("a", first=[COMMIT_FILE])
    assert store.top() == {"b": True}
    assert (tmp_path / "elsewhere" / COMMIT_FILE).exists()


def test_a_store_travels_to_another_process_without_its_connections(store: Any) -> None:
    put(store, "a/x", b"1")
    assert pickle.loads(pickle.dumps(store)).files("a")["x"].size_bytes == 1


def test_a_url_of_no_file_system_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing://"):
        open_store("nothing://bucket/x")
    assert isinstance(open_store("file:///tmp/x"), FolderStore)
    assert isinstance(open_store("memory://x"), FsspecStore)


def test_a_job_saves_to_s3_and_resumes_from_there(s3_server: Any, bucket: str, prefix: str, s3: Any) -> None:
    url, options = f"s3://{bucket}/{prefix}run", storage_options(s3_server.endpoint_url)
    job = Job()
    with job.checkpointer(url, storage_options=options, keep_last=2) as checkpoints:
        assert checkpoints.restore_latest() == 0
        for step in (1, 2, 3):
            job.step()
            checkpoints.save(step)
    expected = job.steps(2)
    again = Job(seed=8)
    with again.checkpointer(url, storage_options=options) as checkpoints:
        assert checkpoints.restore_latest() == 3
    assert again.steps(2) == expected
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}run/")["Contents"]]
    assert len({key.split("/")[2] for key in keys if key.endswith(COMMIT_FILE)}) == 2

    data = next(key for key in reversed(keys) if key.endswith(".distcp"))
    body = bytearray(s3.get_object(Bucket=bucket, Key=data)["Body"].read())
    body[len(body) // 2] ^= 4
    s3.put_object(Bucket=bucket, Key=data, Body=bytes(body))
    with Job().checkpointer(url, storage_options=options) as checkpoints:
        assert checkpoints.restore_latest() == 2
    assert "its bytes have changed" in checkpoints.skipped[0].reason


def test_a_store_that_is_lost_in_the_middle_leaves_nothing_to_choose(s3_server: Any, bucket: str, prefix: str) -> None:
    proxy = CountingProxy(s3_server.port).start()
    url = f"s3://{bucket}/{prefix}run"
    options = storage_options(proxy.url) | {"config_kwargs": {"retries": {"max_attempts": 1}}}
    job = Job()
    with job.checkpointer(url, storage_options=options) as checkpoints, socket.socket() as nobody:
        job.step()
        checkpoints.save(1)
        checkpoints.wait()
        proxy.stop()
        # Kept, so that no other server of this machine gets the port meanwhile; it refuses every connection.
        nobody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        nobody.bind(("127.0.0.1", proxy.port))
        checkpoints.save(2)
        with pytest.raises(SaveFailed, match="step 2 did not end in a commit"):
            checkpoints.wait()
    with Job().checkpointer(url, storage_options=storage_options(s3_server.endpoint_url)) as checkpoints:
        assert checkpoints.restore_latest() == 1


def test_only_an_interrupted_save_in_s3_is_an_error(s3_server: Any, bucket: str, prefix: str) -> None:
    options = storage_options(s3_server.endpoint_url)
    url = f"s3://{bucket}/{prefix}run"
    put(open_store(url, options), "000001-step-5-0a1b2c3d/__0_0.distcp", b"half")
    with (
        Job().checkpointer(url, storage_options=options) as checkpoints,
        pytest.raises(NoValidCheckpoint, match="000001-step-5-0a1b2c3d"),
    ):
        checkpoints.restore_latest()
