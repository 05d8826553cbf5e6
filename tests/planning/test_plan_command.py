"""``cacheloader plan``: what it says, and its exit status."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cacheloader.cli import main

NUMBERS = ["--shards", "200", "--shard-size", "1MiB", "--samples", "20000", "--rate", "1000", "--epochs", "3"]


def forecast(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    status = main(["plan", *NUMBERS, "--shuffle-window", "2", "--json", *more])
    return status, json.loads(capsys.readouterr().out)


def test_a_link_that_carries_what_is_missing_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = forecast(capsys, "--cache-size", "100MiB", "--bandwidth", "20MiB")
    assert status == 0
    assert answer["stall"] < 0.01
    assert answer["least_origin_bytes_per_epoch"] == 100 * 2**20
    assert 0.95 * 100 * 2**20 <= answer["origin_bytes_per_epoch"] <= 1.1 * 100 * 2**20
    assert answer["needed_bytes_per_s"] == pytest.approx(answer["origin_bytes_per_epoch"] / 20)


def test_a_job_that_would_wait_is_a_finding_with_the_size_that_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = forecast(capsys, "--cache-size", "50MiB", "--bandwidth", "5MiB")
    assert status == 1
    assert answer["least_stall"] == pytest.approx(0.5)
    assert 0.5 <= answer["stall"] < 0.65
    enough = answer["enough_cache_bytes"]
    assert 100 * 2**20 < enough <= 200 * 2**20
    status, answer = forecast(capsys, "--cache-size", str(round(enough)), "--bandwidth", "5MiB")
    assert status == 0


def test_people_are_told_in_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *NUMBERS, "--cache-size", "50MiB", "--bandwidth", "5MiB"]) == 1
    out = capsys.readouterr().out
    assert "200.0 MiB in 200 shards" in out
    assert "to end it       a cache of " in out
    # 5 MiB a second all day into 50 MiB.
    assert re.search(r"disk writes     4\d\d\.\d GiB a day, 8\d\d\d\.\d times the cache", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--bandwidth", "1MB", "--cache-size", "1GB"], "either URLs, or --shards"),
        (["--rate", "1", "--bandwidth", "1MB", "--shards", "3", "--cache-size", "1GB"], "belong together"),
        ([*NUMBERS, "--bandwidth", "1MB"], "needs --cache-size"),
        ([*NUMBERS, "--bandwidth", "0", "--cache-size", "1GB"], "bandwidth_bytes_per_s=0.0 is no number above 0"),
        (
            [*NUMBERS, "--bandwidth", "1MB", "--cache-size", "1GB", "--ranks", "300"],
            "300 ranks cannot share 200 shards",
        ),
    ],
)
def test_what_describes_no_job_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
