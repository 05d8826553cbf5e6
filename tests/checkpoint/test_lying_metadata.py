"""Four ways in which ``.metadata`` is there and the checkpoint is not, each made by torch itself.

torch takes its presence for completeness. Each test makes the lie, shows that torch reads it or at least begins to, and
that ``cacheloader ckpt ls --verify`` names it in a plain DCP folder.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from cacheloader.checkpoint.cli import rows
from cacheloader.checkpoint.commit import COMMIT_FILE
from cacheloader.checkpoint.store import FolderStore
from tests.checkpoint.jobs import Job, flip_bit, saved, saves, truncate

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


def state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((64, 64), float(value)), "bias": torch.full((64,), float(value))}


def torch_reads(folder: Path) -> dict[str, Any]:
    into = state(-1)
    dcp.load(into, checkpoint_id=folder)
    return into


def reason(folder: Path) -> str:
    [row] = rows(FolderStore(folder.parent), read_bytes=True, only=[folder.name])
    return row.reason


def test_a_whole_plain_checkpoint_is_found_whole(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path / "step-10")
    [row] = rows(FolderStore(tmp_path), read_bytes=True)
    assert (row.kind, row.step, row.reason, row.proof) == ("torchtitan", 10, "", "checksums")


def test_first_lie_a_data_file_is_missing_or_short(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    truncate(tmp_path / "a" / "__0_0.distcp", by=100)
    (tmp_path / "b" / "__0_0.distcp").unlink()
    dcp.FileSystemReader(tmp_path / "a").read_metadata()  # nothing wrong yet for torch
    dcp.FileSystemReader(tmp_path / "b").read_metadata()
    assert "__0_0.distcp has" in reason(tmp_path / "a")
    assert reason(tmp_path / "b") == "__0_0.distcp is missing"


def test_second_lie_a_folder_is_used_again_and_the_second_save_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "last"
    dcp.save(state(1), checkpoint_id=folder)
    hour_ago = (folder / ".metadata").stat().st_mtime - 3600
    for path in folder.iterdir():
        os.utime(path, (hour_ago, hour_ago))

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(filesystem.FileSystemWriter, "finish", killed)
    with pytest.raises(BaseException, match="KeyboardInterrupt"):
        dcp.save(state(2), checkpoint_id=folder)
    assert torch_reads(folder)["weight"][0, 0] == 2, "torch reads the new bytes under the old record"
    assert "newer than .metadata" in reason(folder)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_third_lie_a_writer_thread_fails_and_torch_does_not_hear_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    real = filesystem.FileSystem.create_stream

    def full_in_threads(self: Any, path: Any, mode: str) -> Any:
        if mode == "wb" and threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        return real(self, path, mode)

    def slow_main(self: Any, write_item: Any) -> Any:  # leaves the second file to the second thread
        if threading.current_thread() is threading.main_thread():
            done.wait(60)
        return resolve(self, write_item)

    done = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: done.set())
    resolve = dcp.DefaultSavePlanner.resolve_data
    monkeypatch.setattr(dcp.DefaultSavePlanner, "resolve_data", slow_main)
    monkeypatch.setattr(filesystem.FileSystem, "create_stream", full_in_threads)
    dcp.save(state(1), storage_writer=dcp.FileSystemWriter(tmp_path / "a", thread_count=2))
    assert (tmp_path / "a" / ".metadata").exists()
    assert "a thread of the writer failed unheard" in reason(tmp_path / "a")


def test_our_own_save_hears_a_writer_thread_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from cacheloader.checkpoint.storage import StoreFiles
    from cacheloader.errors import SaveFailed

    real = StoreFiles.create_stream
    mine = threading.current_thread()

    def full_in_threads(self: Any, path: Any, mode: str) -> Any:
        if mode == "wb" and threading.current_thread() is not mine:
            raise OSError(28, "No space left on device")
        return real(self, path, mode)

    done = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: done.set())
    resolve = dcp.DefaultSavePlanner.resolve_data
    monkeypatch.setattr(
        dcp.DefaultSavePlanner,
        "resolve_data",
        lambda self, item: (threading.current_thread() is mine and done.wait(60)) * 0 or resolve(self, item),
    )
    monkeypatch.setattr(StoreFiles, "create_stream", full_in_threads)
    job = Job()
    job.step()
    with job.checkpointer(tmp_path, mode="sync", thread_count=2) as checkpoints:
        with pytest.raises(SaveFailed, match="were not written"):
            checkpoints.save(1)
        monkeypatch.setattr(StoreFiles, "create_stream", real)
        checkpoints.save(2)
    with Job().checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 2


def test_fourth_lie_the_bytes_changed_after_they_were_written(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path / "a")
    data = tmp_path / "a" / "__0_0.distcp"
    times = data.stat().st_mtime
    flip_bit(data, at=data.read_bytes().index(torch.full((8,), 1.0).numpy().tobytes()) + 2)
    os.utime(data, (times, times))
    assert not torch.equal(torch_reads(tmp_path / "a")["weight"], state(1)["weight"]), "torch reads it without a word"
    assert "wrong checksum" in reason(tmp_path / "a")


def test_a_record_that_is_itself_torn_is_named(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path / "a")
    truncate(tmp_path / "a" / ".metadata", by=50)
    assert ".metadata is torn" in reason(tmp_path / "a")


@pytest.mark.parametrize("lie", ["missing", "short", "from another save", "changed", "torn record"])
def test_each_lie_inside_one_of_our_saves_is_passed_over(tmp_path: Path, lie: str) -> None:
    saved(tmp_path, steps=2)
    older, newer = saves(tmp_path)
    data = newer / "__0_0.distcp"
    if lie == "missing":
        data.unlink()
    elif lie == "short":
        truncate(data)
    elif lie == "from another save":
        shutil.copyfile(older / "__0_0.distcp", data)
    elif lie == "changed":
        flip_bit(data, at=data.stat().st_size // 3)
    else:
        truncate(newer / ".metadata")
    with Job().checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 1
    [skipped] = checkpoints.skipped
    assert skipped.name == newer.name
    assert skipped.reason


def test_a_save_without_its_commit_record_is_never_chosen_though_torch_would_read_it(tmp_path: Path) -> None:
    saved(tmp_path, steps=2)
    newest = saves(tmp_path)[-1]
    (newest / COMMIT_FILE).unlink()
    assert dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
    with Job().checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 1
    assert "interrupted" in checkpoints.skipped[0].reason
