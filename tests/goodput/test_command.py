"""``cacheloader goodput`` on a folder, as a user meets it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

import cacheloader as cl
from cacheloader.cli import main
from cacheloader.errors import ConfigError
from cacheloader.goodput import recorder
from cacheloader.goodput.command import Reader
from cacheloader.goodput.events import encode
from tests.support.goodput_jobs import end_to_end_vector

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The events of the end-to-end vector, a file for each attempt and rank."""
    folder = tmp_path / "vector"
    folder.mkdir()
    for event in end_to_end_vector():
        with (folder / f"events-{event.att}-n0-r{event.rank:05d}.jsonl").open("ab") as file:
            file.write(encode(event))
    return folder


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["goodput", "--json", *arguments]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_one_screen_says_where_the_time_went_and_what_to_do_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["goodput", str(folder)]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 40
    for text in ("goodput 56.53% of the paid time", "kept steps fill 62.81%", "226,131 useful an hour", "1 failure"):
        assert text in out
    assert "first thing to do: spin wait costs 17.0% of the paid time" in out
    assert "the restart dominates" in out


def test_the_json_adds_up_to_the_nanosecond(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, str(folder))
    assert sum(found["device_ns"].values()) == found["paid_device_ns"] == 8 * 1592 * 10**9
    (failure,) = found["failures"]
    assert sum(amount for _, amount in failure["stages"]) == failure["recovery_s"] == 370


def test_the_page_needs_nothing_else_and_its_charts_are_well_formed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "out.html"
    as_json(capsys, str(folder), "--html", str(page))
    text = page.read_text()
    charts = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(charts) >= 4
    for chart in charts:
        ElementTree.fromstring(chart)
    assert not re.search(r"<script|<link|src=|https?://", text)
    assert "56.5%" in text
    assert "prefers-color-scheme: dark" in text


def test_what_a_user_names_does_not_become_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = cl.goodput.Run(tmp_path / "<b>run", rank=0, world_size=1)
    run.__enter__()
    error = RuntimeError("<script>alert(1)</script>")
    run.__exit__(RuntimeError, error, None)
    page = tmp_path / "out.html"
    as_json(capsys, str(tmp_path / "<b>run"), "--html", str(page))
    assert "<script" not in page.read_text()
    assert "<b>run" not in page.read_text()


def test_a_run_without_commits_is_told_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cl.goodput.Run(tmp_path, rank=0, world_size=1) as run:
        list(run.timed(range(3)))
    assert "no commit of a checkpoint was recorded" in as_json(capsys, str(tmp_path))["first"]


def test_a_real_loop_with_checkpoints_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cl.goodput.Run(tmp_path, rank=0, world_size=1) as run:
        for number in run.timed(range(1, 11), tokens=5):
            if number % 5 == 0:
                recorder.ckpt_begin(f"step-{number}", number)
                recorder.ckpt_staged(f"step-{number}", number, stall_s=0.0001)
                recorder.ckpt_commit(f"step-{number}", number, size_bytes=10)
    found = as_json(capsys, str(tmp_path))
    assert found["tokens"] == {"issued": 50, "kept": 50}
    assert sum(found["device_ns"].values()) == found["paid_device_ns"]
    assert found["committed_step"] == 10
    assert found["attempts"][0]["end"] == "done"


def test_the_textfile_is_an_exposition(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    target = tmp_path / "goodput.prom"
    as_json(capsys, str(folder), "--textfile", str(target))
    families = {family.name: family for family in parser.text_string_to_metric_families(target.read_text())}
    ratio = {sample.labels["window"]: sample.value for sample in families["training_goodput_ratio"].samples}
    assert round(ratio["run"], 4) == 0.5653
    tokens = {sample.labels["state"]: sample.value for sample in families["training_tokens"].samples}
    assert tokens == {"issued": 114_000, "kept": 100_000}


def test_a_folder_without_events_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", str(tmp_path)]) == 2
    assert "no goodput events" in capsys.readouterr().err


@pytest.mark.parametrize("names", [("first", "second"), ("first/goodput", "second/goodput")])
def test_a_folder_of_two_runs_is_refused_and_they_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, str]
) -> None:
    for name in names:
        with cl.goodput.Run(tmp_path / name, attempt=f"of-{name[:5]}", rank=0, world_size=1) as run:
            list(run.timed(range(3)))
    assert main(["goodput", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "holds several runs" in said
    assert f"{tmp_path / names[0]}, {tmp_path / names[1]}" in said
    assert as_json(capsys, str(tmp_path / names[1]))["damaged_lines"] == []


def test_the_same_report_comes_from_a_copy_in_an_object_store(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    lines_ = [encode(event) for event in end_to_end_vector()]
    (tmp_path / "vec").mkdir()
    (tmp_path / "vec" / "events-all.jsonl").write_bytes(b"".join(lines_))
    store = fsspec.filesystem("memory")
    store.pipe("/goodput-copy/vec/node-0/events-all.jsonl", b"".join(lines_[:500]))
    remote = Reader("memory://goodput-copy/vec")
    remote.report()
    store.pipe("/goodput-copy/vec/node-0/events-all.jsonl", b"".join(lines_))  # a later copy of the same file
    assert remote.report() == Reader(tmp_path / "vec").report()
    with pytest.raises(ConfigError, match="no goodput events"):
        Reader("memory://goodput-copy/other").report()
