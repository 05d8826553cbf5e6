"""Indexes by worker processes, and what becomes of a task whose worker dies."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cacheloader_daemon import index_worker, prepare
from cacheloader_daemon.index_worker import IndexWorker
from cacheloader_daemon.prepare import Preparers

from cacheloader.errors import CorruptShard, DatasetError, DeadlineExceeded
from cacheloader.formats import registry
from cacheloader.formats.base import index_samples
from tests.support.buffers import BufferSource
from tests.support.descriptors import open_files, opened_since
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheloader_daemon.index_worker import Prepared


def tar_of(num_samples: int, *, payload_bytes: int = 100) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for sample in range(num_samples):
            info = tarfile.TarInfo(f"{sample:06d}.bin")
            info.size = payload_bytes
            tar.addfile(info, io.BytesIO(bytes([sample % 256]) * payload_bytes))
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may take as long as the machine lets it, where a test does not say otherwise."""
    monkeypatch.setattr(prepare, "BASE_TIMEOUT_S", 90.0)
    monkeypatch.setattr(index_worker, "STOP_TIMEOUT_S", 60.0)


class Stopped(subprocess.Popen[bytes]):
    """A process that does no work: it is stopped before anybody who started it has told it anything."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.send_signal(signal.SIGSTOP)


@pytest.fixture
async def preparers() -> AsyncIterator[Preparers]:
    preparers = Preparers(1)
    yield preparers
    await preparers.aclose()


async def prepared(preparers: Preparers, content: bytes, path: Path) -> Prepared:
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        return await preparers.prepare(fd, format_name="webdataset", uri="s3://b/a.tar", size_bytes=len(content))
    finally:
        os.close(fd)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_the_index_is_that_of_the_bytes(preparers: Preparers, tmp_path: Path) -> None:
    content = tar_of(30, payload_bytes=70_000)
    result = await prepared(preparers, content, tmp_path / "a")
    expected = registry.named("webdataset").build_index(BufferSource(content), uri="s3://b/a.tar")
    assert result.read_index() == expected
    assert index_samples(result.read_index()) == 30
    result.close()


async def test_a_damaged_shard_is_reported_and_its_worker_serves_the_next(preparers: Preparers, tmp_path: Path) -> None:
    await preparers.warm()
    pids = preparers.pids
    whole = tar_of(5)
    for damaged in (whole[:1400], b"x" * 4096, b""):
        with pytest.raises(CorruptShard, match=r"s3://b/a\.tar"):
            await prepared(preparers, damaged, tmp_path / "damaged")
    (await prepared(preparers, whole, tmp_path / "whole")).close()
    assert preparers.pids == pids


async def test_a_second_worker_is_started_for_a_backlog_only_and_at_the_lowest_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Two shards, one behind the other. 2. The first worker stops, and a shard waits for it. 3. Another comes."""
    preparers = Preparers(2)
    monkeypatch.setattr(prepare, "BACKLOG_S", 60.0)
    try:
        for result in await asyncio.gather(*(prepared(preparers, tar_of(1), tmp_path / name) for name in "ab")):
            result.close()
        (first,) = preparers.pids
        os.kill(first, signal.SIGSTOP)
        stuck = asyncio.ensure_future(_prepared_and_closed(preparers, tmp_path / "c"))
        await until(preparers._free.empty)
        monkeypatch.setattr(prepare, "BACKLOG_S", 0.0)
        await _prepared_and_closed(preparers, tmp_path / "d")
        os.kill(first, signal.SIGCONT)
        await stuck
        second = preparers.pids[1]
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, first) == own
        assert os.getpriority(os.PRIO_PROCESS, second) == 19
    finally:
        await preparers.aclose()


async def test_a_worker_killed_before_its_task_costs_one_more_try(preparers: Preparers, tmp_path: Path) -> None:
    await preparers.warm()
    os.kill(preparers.pids[0], signal.SIGKILL)
    (await prepared(preparers, tar_of(3), tmp_path / "a")).close()
    assert preparers.num_lost == 1


async def test_a_shard_that_ends_two_workers_is_given_up(preparers: Preparers, tmp_path: Path) -> None:
    """1. A worker is stopped and killed at its task. 2. So is its successor, while it starts. 3. The shard fails."""
    path = tmp_path / "a"
    await preparers.warm()
    first = preparers.pids[0]
    os.kill(first, signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Stopped)
        task = asyncio.ensure_future(_prepared_and_closed(preparers, path))
        os.kill(first, signal.SIGKILL)
        await until(lambda: bool(preparers.pids) and preparers.pids[0] != first)
        os.kill(preparers.pids[0], signal.SIGKILL)
        with pytest.raises(DatasetError, match=r"s3://b/a\.tar ended the indexing process twice"):
            await task
    (await prepared(preparers, tar_of(3), tmp_path / "b")).close()


async def _prepared_and_closed(preparers: Preparers, path: Path) -> None:
    result = await prepared(preparers, tar_of(3), path)
    result.close()


async def test_a_worker_that_does_not_answer_in_time_is_ended(
    preparers: Preparers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await preparers.warm()
    pid = preparers.pids[0]
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(prepare, "BASE_TIMEOUT_S", 0.1)
    with pytest.raises(DeadlineExceeded, match=r"s3://b/a\.tar .* was not indexed within"):
        await prepared(preparers, tar_of(3), tmp_path / "a")
    assert not is_running(pid)


async def test_a_worker_that_outlives_its_end_does_not_hide_why_it_was_ended(
    preparers: Preparers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await preparers.warm()
    process = preparers._workers[0]._process
    assert process is not None

    def sits_in_a_system_call(timeout_s: float) -> int:
        raise subprocess.TimeoutExpired("indexer", timeout_s)

    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(process, "wait", sits_in_a_system_call)
    monkeypatch.setattr(prepare, "BASE_TIMEOUT_S", 0.1)
    with pytest.raises(DeadlineExceeded, match="was not indexed within"):
        await prepared(preparers, tar_of(3), tmp_path / "a")
    assert "did not end within" in caplog.text
    monkeypatch.undo()
    assert process.wait(60) == -signal.SIGKILL


async def test_a_cancelled_task_leaves_no_descriptor_and_no_stuck_worker(tmp_path: Path) -> None:
    before = open_files()
    preparers = Preparers(1)
    await preparers.warm()
    os.kill(preparers.pids[0], signal.SIGSTOP)
    task = asyncio.ensure_future(prepared(preparers, tar_of(3), tmp_path / "a"))
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (await prepared(preparers, tar_of(3), tmp_path / "b")).close()
    await preparers.aclose()
    await until(lambda: not opened_since(before))


async def test_closing_ends_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "BACKLOG_S", 0.0)
    before = open_files()
    preparers = Preparers(2)
    results = await asyncio.gather(*(prepared(preparers, tar_of(3), tmp_path / str(n)) for n in range(4)))
    for result in results:
        result.close()
    pids = preparers.pids
    assert len(pids) == 2
    await preparers.aclose()
    await preparers.aclose()
    assert not any(is_running(pid) for pid in pids)
    await until(lambda: not opened_since(before))


def test_the_indexer_is_started_by_code_that_imports_neither_asyncio_nor_numpy() -> None:
    program = "import sys, cacheloader_daemon.cli; print({'asyncio', 'numpy'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "set()"


def test_the_indexer_imports_no_numpy() -> None:
    program = (
        "import sys, cacheloader_daemon.indexer, cacheloader.formats.registry as registry;"
        "registry.named('webdataset').build_index; print({'asyncio', 'numpy'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "set()"


async def test_an_indexer_that_runs_already_makes_the_first_index_and_ends_with_the_others(tmp_path: Path) -> None:
    first = IndexWorker(0)
    first.start()
    pid = first.pid
    preparers = Preparers(1, first)
    try:
        (await prepared(preparers, tar_of(3), tmp_path / "a")).close()
        assert preparers.pids == [pid]
    finally:
        await preparers.aclose()
    assert not is_running(pid)
