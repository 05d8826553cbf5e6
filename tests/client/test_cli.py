import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cacheloader import cli
from cacheloader.cli import main
from cacheloader.config import TransportOptions
from cacheloader.transport import control
from cacheloader.transport.control import read_status
from tests.support.shard_sets import ShardSet, write_shards

# A machine that is busy may pause a daemon for as long as a user waits for its answer.
stop_daemon = partial(control.stop_daemon, timeout_s=60)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "read_status", partial(read_status, timeout_s=60))
    monkeypatch.setattr(cli, "stop_daemon", stop_daemon)
    monkeypatch.setattr(cli, "TransportOptions", partial(TransportOptions, hello_timeout_s=60, launch_timeout_s=100))


@pytest.fixture
def shard_set(tmp_path: Path) -> ShardSet:
    return write_shards(tmp_path / "train", num_shards=3, samples_per_shard=4)


@pytest.fixture
def where(tmp_path: Path) -> Iterator[list[str]]:
    cache_dir = tmp_path / "cache"
    yield ["--cache-dir", str(cache_dir), "--cache-size", "64MiB"]
    stop_daemon(cache_dir)


def test_an_index_holds_the_count_of_every_shard_and_spares_the_next_job_the_scan(
    shard_set: ShardSet, where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = shard_set.folder / "shards.json"
    assert main(["index", str(shard_set.folder), *where, "--output", str(output)]) == 0
    assert "12 samples in 3 shards" in capsys.readouterr().out
    rows = json.loads(output.read_text())["shardlist"]
    assert [(row["url"], row["nsamples"]) for row in rows] == [(path.name, 4) for path in shard_set.paths]


def test_an_index_sees_a_shard_that_was_added_a_moment_ago(
    shard_set: ShardSet, where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["index", str(shard_set.folder), *where, "--json"]) == 0
    write_shards(tmp_path / "more", num_shards=1, samples_per_shard=4, seed=1).paths[0].rename(
        shard_set.folder / "shard-000003.tar"
    )
    assert main(["index", str(shard_set.folder), *where, "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["num_shards"], second["num_shards"]) == (3, 4)


def test_a_cache_is_warmed_and_its_state_shown(
    shard_set: ShardSet, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", str(shard_set.folder), *where, "--json"]) == 0
    assert sum(json.loads(capsys.readouterr().out)["shards_by_source"].values()) == 3
    assert main(["status", *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["resident_shards"] == 3
    assert main(["status", *where]) == 0
    assert "3 shards" in capsys.readouterr().out
    assert main(["status", *where, "--stop"]) == 0
    assert main(["status", *where]) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["index", "{train}", "--output", "/nonexistent/shards.json"], 2, "/nonexistent/shards.json"),
        (["index", "{train}", "--storage-options", "{nope"], 2, "--storage-options"),
        (["warm", ""], 2, "a URL is empty"),
        (["warm", "{train}", "--daemon", "none"], 2, "--daemon none"),
        (["warm", "{train}/no-such-*.tar"], 1, "no-such-"),
        (["status", "--daemon", "unix:///nonexistent/x.sock", "--stop"], 2, "--stop"),
        (["demo", "--jpegs", "10"], 2, "10"),
    ],
)
def test_wrong_use_ends_with_a_sentence_and_its_status(
    shard_set: ShardSet,
    where: list[str],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    text: str,
) -> None:
    filled = [argument.replace("{train}", str(shard_set.folder)) for argument in arguments]
    at = [] if "--daemon" in filled or filled[0] == "demo" else where
    assert main([*filled, *at]) == status
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


def test_planning_for_a_size_gives_it_to_no_daemon(
    shard_set: ShardSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_dir = tmp_path / "cache"
    where = ["--cache-dir", str(cache_dir)]
    numbers = ["--cache-size", "1MiB", "--bandwidth", "1MB", "--rate", "10", "--json"]
    try:
        assert main(["plan", str(shard_set.folder), *where, *numbers]) in (0, 1)
        assert json.loads(capsys.readouterr().out)["cache_bytes"] == 2**20
        assert main(["status", *where, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["plan"]["quota_bytes"] > 2**20
    finally:
        stop_daemon(cache_dir)


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback(
    shard_set: ShardSet, where: list[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [
            sys.executable,
            "-c",
            "from cacheloader.cli import main; exit(main())",
            "index",
            str(shard_set.folder),
            *where,
        ]
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")
