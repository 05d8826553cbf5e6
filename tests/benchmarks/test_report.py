from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.harness.measurement import CpuSeconds, Failure, Measurement, PeakMemory, Phase, Round, Tally
from benchmarks.harness.report import Comparison, Report


def measurement(name: str, wall_s: float, *, other_cores: float = 0.0, noisy_before: int = 0) -> Measurement:
    phase = Phase(
        name=name,
        samples=100,
        size_bytes=10**7,
        wall_s=wall_s,
        epoch_s=[wall_s],
        first_batch_s=wall_s / 10,
        fetch_p50_s=0.001,
        fetch_p99_s=0.002,
        fetch_total_s=wall_s / 4,
        marks={"first_batch_samples": 10, "data_set_open_s": 0.25},
        cpu_s=CpuSeconds(client=1.0, daemon=2.0, server=3.0, other=other_cores * wall_s, interrupts=0.0, steal=0.0),
        peak_memory_bytes=PeakMemory(main=10**8, worker=0, daemon=2 * 10**8),
        origin_bytes=10**7,
        page_cache="empty",
    )
    return Measurement(
        phases=[phase],
        verified=Tally(samples=100, size_bytes=10**7),
        configuration={"workers": 0},
        noisy_before=noisy_before,
    )


def report(target: float, *, over: str = "one", figure: str = "samples/s") -> Report:
    rounds = [
        Round(measured={"one": measurement("cold", wall_s), "other": measurement("cold", 2 * wall_s)})
        for wall_s in (1.0, 2.0, 4.0)
    ]
    return Report(
        theme="theme",
        machine="machine",
        date="2026-01-31",
        environment={"cores": 2, "load_before": [0.5, 0.25, 0.125]},
        parameters={"samples": 100},
        rounds=rounds,
        comparisons=[
            Comparison(name="one / other", over=(over, "cold"), under=("other", "cold"), target=target, figure=figure)
        ],
        notes=["a note"],
    )


def test_report_is_named_by_theme_machine_and_date(tmp_path):
    data, text = report(1.5).write(tmp_path)
    assert [path.name for path in (data, text)] == [
        "theme_machine_2026-01-31.json",
        "theme_machine_2026-01-31.md",
    ]


def test_json_holds_every_repeat(tmp_path):
    data, _ = report(1.5).write(tmp_path)
    content = json.loads(data.read_text())
    assert [Measurement.from_dict(measured["one"]).phases[0].wall_s for measured in content["rounds"]] == [
        1.0,
        2.0,
        4.0,
    ]
    assert content["ratios"][0]["median"] == 2.0


def test_a_target_that_holds_and_one_that_does_not_are_told_apart():
    assert "| one / other | samples/s | 2 | ≥ 1.5 | met |" in report(1.5).markdown()
    assert "| one / other | samples/s | 2 | ≥ 3 | **missed** |" in report(3.0).markdown()


def test_a_ratio_to_a_contestant_that_did_not_run_is_left_out():
    assert report(1.5, over="absent").ratios() == []


def test_figures_show_median_and_range():
    text = report(1.5).markdown()
    assert "| one | 50 [25–100] | 5 [2–10] | 0.25 | 0.20 [0.10–0.40] |" in text
    assert "load before: 0.50, 0.25, 0.12" in text


def test_a_ratio_may_leave_out_the_time_until_the_data_set_was_open():
    # 0.25 s of each run: 1.75 / 0.75, 3.75 / 1.75, 7.75 / 3.75.
    [(_, ratio)] = report(1.5, figure="samples/s from the open data set on").ratios()
    assert ratio.median == pytest.approx(3.75 / 1.75)


def test_a_figure_of_one_contestant_is_held_against_a_bound_from_above():
    waiting = Comparison(
        name="waits", over=("one", "cold"), under=None, target=0.3, figure="waiting share", at_most=True
    )
    shown = replace(report(1.5), comparisons=[waiting])
    assert "| waits | waiting share | 0.25 | ≤ 0.3 | met |" in shown.markdown()
    strict = replace(shown, comparisons=[replace(waiting, target=0.2)])
    assert "| waits | waiting share | 0.25 | ≤ 0.2 | **missed** |" in strict.markdown()


def test_a_figure_that_nobody_measures_is_refused_by_name():
    with pytest.raises(ValueError, match="no figure is called 'speed'; there are samples/s"):
        Comparison(name="fast", over=("one", "cold"), under=None, figure="speed")


def test_noise_and_what_was_thrown_away_for_it_are_named():
    noisy = replace(
        report(1.5),
        rounds=[
            Round(
                measured={
                    "one": measurement("cold", 1.0, other_cores=0.75, noisy_before=2),
                    "other": measurement("cold", 1.0),
                }
            ),
            Round(measured={"one": measurement("cold", 1.0, noisy_before=1), "other": measurement("cold", 1.0)}),
        ],
    )
    assert "3 runs were thrown away" in noisy.markdown()
    assert "of the 4 that count, 1 were as noisy" in noisy.markdown()


def test_a_contestant_that_failed_stands_in_every_table_with_what_it_said():
    failure = Failure(kind="ValueError", message="no such | thing")
    rounds = [
        replace(one, measured={"one": one.measured["one"]}, failed={"other": failure}) for one in report(1).rounds
    ]
    shown = replace(report(1.5), rounds=rounds)
    text = shown.markdown()
    assert "| other | 3 of 3 runs | ValueError: no such \\| thing |" in text
    assert "| other | failed | – |" in text
    assert shown.ratios() == []
    assert shown.to_dict()["failed"][0] == {"other": {"kind": "ValueError", "message": "no such | thing"}}


def test_ratios_come_from_the_rounds_in_which_both_were_measured():
    rounds = list(report(1.5).rounds)
    rounds[0] = replace(
        rounds[0], measured={"other": measurement("cold", 9.0)}, failed={"one": Failure(kind="hung", message="")}
    )
    shown = replace(report(1.5), rounds=rounds)
    [(_, ratio)] = shown.ratios()
    assert ratio.repeats == 2
    assert "| one | 1 of 3 runs | hung |" in shown.markdown()
