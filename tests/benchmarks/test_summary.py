from __future__ import annotations

import json
import math
import re
import tomllib
from importlib import import_module

import pytest

from benchmarks import __main__ as bench
from benchmarks.harness.runner import ROOT
from benchmarks.running import Ran
from benchmarks.schedule import PARTS, PROFILES, PROGRAMS, SCENARIOS, SLACK, Part, shares_s, table
from benchmarks.summary.document import REASONS, summarize
from benchmarks.summary.goals import GOALS


def report(folder, theme, *ratios):
    path = folder / f"{theme}_machine_2026-01-31.json"
    path.write_text(json.dumps({"environment": {"commit": "abc", "cores": 2}, "ratios": list(ratios)}))
    return path


def ratio(name, median, *, goal="cold-peers", target=2.0, at_most=False):
    return {
        "name": name, "goal": goal, "target": target, "at_most": at_most, "median": median,
        "least": median - 0.1, "most": median + 0.1, "repeats": 5,
    }  # fmt: skip


def summary_of(reports):
    return summarize(reports, machine="machine", date="2026-01-31", parts=dict.fromkeys(reports, "ran"))


def row_of(summary, goal):
    return next(row for row in summary.rows if row.goal == goal)


def test_of_several_comparisons_of_a_target_the_worst_is_shown(tmp_path):
    path = report(tmp_path, "two-epochs", ratio("/ slow peer", 9.0), ratio("/ best peer", 2.5), ratio("/ other", 4.0))
    row = row_of(summary_of({"two-epochs": path}), "cold-peers")
    assert (row.comparison, row.median, row.verdict, row.rounds) == ("/ best peer", 2.5, "met", 5)
    assert row.report == path.name


def test_of_bounds_from_above_the_largest_is_the_worst(tmp_path):
    found = [ratio(name, value, goal="cpu-cold", target=1, at_most=True) for name, value in (("a", 0.4), ("b", 1.2))]
    row = row_of(summary_of({"two-epochs": report(tmp_path, "two-epochs", *found)}), "cpu-cold")
    assert (row.comparison, row.verdict) == ("b", "missed")


def test_of_bounds_from_above_what_is_below_zero_is_no_worst(tmp_path):
    found = [ratio(name, value, goal="scale", target=0.1, at_most=True) for name, value in (("a", -0.2), ("b", 0.05))]
    row = row_of(summary_of({"scale": report(tmp_path, "scale", *found)}), "scale")
    assert (row.comparison, row.verdict) == ("b", "met")


def test_what_has_no_target_stands_below_the_targets(tmp_path):
    found = ratio("first batch after a resume, s", 0.5, goal="", target=None) | {"figure": "first batch s"}
    pressure = tmp_path / "pressure.json"
    case = {
        "case": {"name": "one job, planned", "num_jobs": 1},
        "dataset_bytes": 100, "cached_bytes": 25.0, "least_bytes": 75.0, "bytes_per_epoch": 77.0,
    }  # fmt: skip
    pressure.write_text(json.dumps({"environment": {}, "bytes": [case]}))
    text = summary_of({"node": report(tmp_path, "node", found), "pressure-bytes": pressure}).markdown()
    assert "| first batch after a resume, s (first batch s) | 0.5 [0.4–0.6] | node |" in text
    assert "a cache of 25%: bytes from the store an epoch | 0.770 of the data set; no policy goes below 0.750 |" in text


def test_a_target_that_did_not_run_in_this_call_is_not_measured_though_older_reports_lie_there(tmp_path):
    report(tmp_path, "decode", ratio("warm / bare", 1.0, goal="decode", target=0.97))
    summary = summary_of({"two-epochs": report(tmp_path, "two-epochs", ratio("/ peer", 3.0))})
    assert row_of(summary, "decode").verdict == "not measured"
    assert "| | | | | not measured | |" in summary.markdown()


def test_a_reason_is_printed_for_a_missed_target_and_for_no_other(tmp_path):
    reason = " ".join(tomllib.loads(REASONS.read_text())["cold-peers"].split())
    missed = summary_of({"two-epochs": report(tmp_path, "two-epochs", ratio("/ peer", 1.5))})
    assert reason in missed.markdown()
    met = summary_of({"two-epochs": report(tmp_path, "two-epochs", ratio("/ peer", 2.5))})
    assert reason not in met.markdown()
    assert reason not in json.dumps([row.reason for row in met.rows])


def test_a_missed_target_that_nobody_has_explained_says_so(tmp_path):
    found = ratio("warm samples/s", 5e4, goal="small-samples", target=1e5)
    row = row_of(summary_of({"small-samples": report(tmp_path, "small-samples", found)}), "small-samples")
    assert (row.verdict, row.reason) == ("missed", "not known yet")


def test_reasons_and_comparisons_name_targets_that_there_are():
    keys = {goal.key for goal in GOALS}
    assert set(tomllib.loads(REASONS.read_text())) <= keys
    answered = {"scale"}
    for part in SCENARIOS.values():
        for comparison in import_module(part.module).COMPARISONS:
            assert comparison.goal in keys | {""}, comparison.name
            if comparison.goal:
                assert comparison.target is not None, comparison.name
                assert next(goal.theme for goal in GOALS if goal.key == comparison.goal) == part.theme
                answered.add(comparison.goal)
    assert answered == keys, "each target is answered by some comparison"


def test_summary_is_written_beside_the_reports(tmp_path):
    paths = summary_of({"two-epochs": report(tmp_path, "two-epochs", ratio("/ peer", 3.0))}).write(tmp_path)
    assert [path.name for path in paths] == ["summary_machine_2026-01-31.md", "summary_machine_2026-01-31.json"]
    assert json.loads(paths[1].read_text())["parts"] == {"two-epochs": "ran"}
    assert "(two-epochs_machine_2026-01-31.md)" in paths[0].read_text()


def test_the_profile_of_the_targets_runs_all_that_they_speak_of_with_five_rounds_in_what_make_allows():
    parts = [PARTS[theme] for theme in PROFILES["targets"]]
    [minutes] = re.findall(r"^MINUTES \?= (\d+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sum(part.estimate_s(5) for part in parts) <= 60 * int(minutes)
    assert {goal.theme for goal in GOALS} <= set(PROFILES["targets"])
    assert set(PROFILES["all"]) == set(SCENARIOS) | set(PROGRAMS)
    assert "in all" in table(parts, repeats=5)


def test_a_limit_of_time_is_shared_in_proportion_to_the_estimates():
    parts = [Part(theme=str(i), module="m", prepare_s=0, round_s=round_s) for i, round_s in enumerate((30, 10, 20))]
    assert shares_s(parts, repeats=5, budget_s=120) == pytest.approx(SLACK * 60)
    assert shares_s(parts[1:], repeats=5, budget_s=30) == pytest.approx(SLACK * 10)
    assert shares_s(parts[2:], repeats=5, budget_s=30) == 30, "nobody gets more than there is"
    assert shares_s(parts, repeats=5, budget_s=math.inf) == math.inf
    assert shares_s(parts, repeats=5, budget_s=-1) == 0


def test_a_scenario_that_says_all_in_fewer_rounds_is_not_run_more_often():
    part = Part(theme="it", module="m", prepare_s=5, round_s=10, most_rounds=2)
    assert (part.rounds(5), part.rounds(1), part.estimate_s(5)) == (2, 1, 25)


def test_a_part_that_fails_or_has_no_time_left_is_named_and_the_others_run(tmp_path, monkeypatch):
    ran = []

    def run(part, settings, *, budget_s):
        ran.append(part.theme)
        if part.theme == "decode":
            raise RuntimeError("on purpose")
        return Ran(report=report(tmp_path, part.theme, ratio("/ peer", 2.5)), said="5 of 5 rounds")

    monkeypatch.setattr(bench, "run_scenario", run)
    monkeypatch.setattr(bench.Stop, "listen", lambda *_: None)
    arguments = ["--profile", "targets", "--machine", "machine", "--output", str(tmp_path), "--work", str(tmp_path)]
    parts = ["--part", "two-epochs", "--part", "decode", "--part", "stall"]
    assert bench.main([*arguments, *parts]) == 1
    assert ran == ["two-epochs", "stall", "decode"]

    def parts_said():
        [*_, path] = sorted(tmp_path.glob("summary_machine_*.json"))  # two if midnight (UTC) has passed
        return json.loads(path.read_text())["parts"]

    assert parts_said() == {"two-epochs": "5 of 5 rounds", "stall": "5 of 5 rounds", "decode": "failed: RuntimeError"}
    assert bench.main([*arguments, *parts, "--budget", "0.1"]) == 0
    assert len(ran) == 3
    assert set(parts_said().values()) == {"left out, since no time was left"}
