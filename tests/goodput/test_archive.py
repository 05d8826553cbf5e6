"""Event files reach an object store by themselves, whatever happens to the store and to the rank meanwhile."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cacheloader as cl
from cacheloader.cli import main
from cacheloader.goodput.command import Reader
from tests.support.counting_proxy import Fault
from tests.support.node_daemon import REPOSITORY, is_running
from tests.support.parent_death import die_with_parent
from tests.support.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, storage_options
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.counting_proxy import CountingProxy

# A process that copies begins with the library of a store, whose import takes long on a busy machine.
pytestmark = pytest.mark.timeout(400)

SEGMENT_BYTES = 4000
PATIENCE_S = 120.0
KILLED = """
import json, os, sys, time
import cacheloader as cl

task = json.loads(sys.argv[1])
with cl.goodput.Run(task.pop("folder"), rank=0, world_size=1, attempt="first", **task) as run:
    for number in run.timed(range(10**9)):
        if number == 20:
            print("trained", flush=True)
            sys.stdin.read()
"""


@pytest.fixture
def copied(s3: Any, bucket: str, prefix: str) -> Callable[[], dict[str, bytes]]:
    """What lies in the archive, by name."""

    def look() -> dict[str, bytes]:
        listed = s3.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}runs/7/").get("Contents", [])
        keys = [entry["Key"] for entry in listed]
        return {key.rpartition("/")[2]: s3.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}

    return look


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("events-*.jsonl")}


def train(run: cl.goodput.Run, num_segments: int) -> None:
    run.recorder._segment_bytes = SEGMENT_BYTES
    first = len(written(run.folder))
    while len(written(run.folder)) < first + num_segments:
        run.step()


def puts(proxy: CountingProxy) -> list[int]:
    return [exchange.status for exchange in proxy.exchanges if exchange.method == "PUT"]


def test_full_files_are_copied_while_the_run_goes_on_the_last_at_its_end_and_the_copy_gives_the_same_report(
    tmp_path: Path, s3_server: Any, bucket: str, prefix: str, copied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = f"s3://{bucket}/{prefix}runs/7", tmp_path / "7"
    options = storage_options(s3_server.endpoint_url)
    with cl.goodput.Run(
        folder, rank=0, world_size=1, archive=url, storage_options=options, archive_timeout_s=PATIENCE_S
    ) as run:
        train(run, 2)
        full = {name: content for name, content in written(folder).items() if name != run.recorder.path.name}
        assert len(full) == 2
        wait_until(lambda: full.items() <= copied().items(), timeout_s=PATIENCE_S)
        assert run.recorder.path.name not in copied(), "a file that still grows was copied"
    assert copied() == written(folder)
    here = Reader(folder).report()
    for name, value in {"ACCESS_KEY_ID": ACCESS_KEY, "SECRET_ACCESS_KEY": SECRET_KEY, "DEFAULT_REGION": REGION}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint_url)
    assert Reader(url).report() == here
    assert main(["goodput", url]) == 0


def test_an_outage_of_the_store_costs_no_file_and_is_told_once(
    tmp_path: Path, s3_proxy: CountingProxy, bucket: str, prefix: str, copied: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url, folder = f"s3://{bucket}/{prefix}runs/7", tmp_path / "7"
    s3_proxy.inject(Fault(action="status", status=500, method="PUT"))
    options = storage_options(s3_proxy.url)
    with (
        caplog.at_level(logging.WARNING, logger="cacheloader.goodput.archive"),
        cl.goodput.Run(
            folder, rank=0, world_size=1, archive=url, storage_options=options, archive_timeout_s=PATIENCE_S
        ) as run,
    ):
        train(run, 1)
        wait_until(lambda: has_something_to_say(run), timeout_s=PATIENCE_S)
        num_failed = len(puts(s3_proxy))
        train(run, 1)  # each full file makes it try again
        wait_until(lambda: len(puts(s3_proxy)) > num_failed, timeout_s=PATIENCE_S)
        assert "were not copied to" in caplog.text
        assert copied() == {}
        s3_proxy.reset()
        train(run, 1)
    assert copied() == written(folder)
    assert len([record for record in caplog.records if "were not copied to" in record.message]) == 1


@pytest.mark.parametrize("is_out", [False, True], ids=["store-there", "store-away"])
def test_what_a_killed_rank_left_is_copied_by_itself_or_by_the_next_attempt_and_never_twice(
    is_out: bool, tmp_path: Path, s3_proxy: CountingProxy, bucket: str, prefix: str, copied: Any
) -> None:
    url, folder = f"s3://{bucket}/{prefix}runs/7", tmp_path / "7"
    if is_out:
        s3_proxy.inject(Fault(action="status", status=500, method="PUT"))
    options: dict[str, Any] = {
        "archive": url, "storage_options": storage_options(s3_proxy.url), "archive_timeout_s": PATIENCE_S,
    }  # fmt: skip
    task = {"folder": str(folder), **options, "archive_timeout_s": 6.0 if is_out else PATIENCE_S}
    with subprocess.Popen(
        die_with_parent([sys.executable, "-c", KILLED, json.dumps(task)]),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as rank:  # fmt: skip
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"trained\n"
        archivist = archivist_of(rank.pid)
        rank.send_signal(signal.SIGKILL)
        rank.wait(60)
    left = written(folder)
    assert len(left) == 1
    wait_until(lambda: not is_running(archivist), timeout_s=PATIENCE_S + 30)
    wait_until(lambda: s3_proxy.num_connections == 0)  # what it asked last has been answered, too, and counted
    assert copied() == ({} if is_out else left)
    s3_proxy.reset()
    with cl.goodput.Run(folder, rank=0, world_size=1, attempt="second", **options) as run:
        list(run.timed(range(3)))
    assert copied() == written(folder)
    assert len(copied()) == 2
    assert puts(s3_proxy) == [200] * (2 if is_out else 1)


def test_a_store_that_never_comes_back_holds_the_end_of_a_run_no_longer_than_agreed(
    tmp_path: Path, s3_proxy: CountingProxy, bucket: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    s3_proxy.inject(Fault(action="status", status=500, method="PUT"))
    options = storage_options(s3_proxy.url)
    with cl.goodput.Run(
        tmp_path / "7", rank=0, world_size=1, archive=f"s3://{bucket}/{prefix}runs/7", storage_options=options,
        archive_timeout_s=2.0,
    ) as run:  # fmt: skip
        list(run.timed(range(3)))
    assert "were not copied to" in caplog.text
    assert Reader(tmp_path / "7").report()["attempts"][0]["end"] == "done"


def test_files_of_ranks_that_are_no_more_are_copied_by_those_that_are(
    tmp_path: Path, s3_server: Any, bucket: str, prefix: str, copied: Any
) -> None:
    folder = tmp_path / "7"
    for rank in range(4):
        with cl.goodput.Run(folder, rank=rank, world_size=4, attempt="four") as run:
            list(run.timed(range(2)))
    for rank in range(2):
        with cl.goodput.Run(
            folder, rank=rank, world_size=2, attempt="two", archive=f"s3://{bucket}/{prefix}runs/7",
            storage_options=storage_options(s3_server.endpoint_url), archive_timeout_s=PATIENCE_S,
        ) as run:  # fmt: skip
            list(run.timed(range(2)))
    assert copied() == written(folder)
    assert len(copied()) == 6


def has_something_to_say(run: cl.goodput.Run) -> bool:
    """Whether the process that copies has told of a failure."""
    assert run._archive is not None
    ready, _, _ = select.select([run._archive._socket], [], [], 0)
    return bool(ready)


def archivist_of(pid: int) -> int:
    """The process that copies the files of rank ``pid``."""
    [child] = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return child
