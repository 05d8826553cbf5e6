"""Published numbers, reproduced."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ConfigError
from cacheloader.goodput.advisor import (
    advise,
    chance_of_any,
    chance_of_failure,
    daly,
    exact_goodput,
    exact_interval,
    mean_time_between_failures,
    simple_goodput,
    young,
)

HOUR, DAY = 3600, 86400


@pytest.mark.parametrize(("mtbf_h", "interval_s", "goodput"), [(24, 7200, 0.9167), (6, 3600, 0.8333)])
def test_youngs_interval_and_its_goodput(mtbf_h: float, interval_s: float, goodput: float) -> None:
    assert young(300, mtbf_h * HOUR) == pytest.approx(interval_s)
    assert 1 - 2 * 300 / young(300, mtbf_h * HOUR) == pytest.approx(goodput, abs=5e-5)  # 1 - sqrt(2C/M)
    assert simple_goodput(interval_s, cost_s=300, mtbf_s=mtbf_h * HOUR) == pytest.approx(goodput, abs=5e-5)


@pytest.mark.parametrize(
    ("mtbf_s", "daly_min", "exact_s"), [(24 * HOUR, 116.7, 7001), (6 * HOUR, 56.7, 3403), (900, 9.1, 550)]
)
def test_dalys_interval_and_the_exact_optimum(mtbf_s: float, daly_min: float, exact_s: float) -> None:
    assert daly(300, mtbf_s) / 60 == pytest.approx(daly_min, abs=0.05)
    assert exact_interval(cost_s=300, mtbf_s=mtbf_s) == pytest.approx(exact_s, abs=1)


def test_daly_saves_at_the_rate_of_failures_where_a_save_costs_more_than_that() -> None:
    assert daly(2000, 900) == 900


@pytest.mark.parametrize(("interval_s", "exact"), [(7200, 0.6841), (1800, 0.9131)])
def test_the_exact_model_for_8_6_failures_a_day(interval_s: float, exact: float) -> None:
    assert exact_goodput(interval_s, cost_s=0, mtbf_s=DAY / 8.6) == pytest.approx(exact, abs=5e-5)


def test_the_first_order_is_pessimistic() -> None:
    assert simple_goodput(7200, cost_s=0, mtbf_s=DAY / 8.6) == pytest.approx(0.6417, abs=5e-5)
    assert simple_goodput(1800, cost_s=0, mtbf_s=DAY / 8.6) == pytest.approx(0.9104, abs=5e-5)


@pytest.mark.parametrize(("interval_s", "goodput"), [(7200, 0.6333), (1800, 0.8771), (720, 0.8808), (180, 0.6577)])
def test_more_often_stops_to_pay(interval_s: float, goodput: float) -> None:
    assert simple_goodput(interval_s, cost_s=60, mtbf_s=10_046.5) == pytest.approx(goodput, abs=5e-5)


def test_the_refined_form() -> None:
    mtbf_s = 2.7907 * HOUR
    assert simple_goodput(1800, cost_s=60, mtbf_s=mtbf_s, restart_s=300) == pytest.approx(0.8472, abs=5e-5)
    assert exact_goodput(1800, cost_s=60, mtbf_s=mtbf_s, restart_s=300) == pytest.approx(0.8550, abs=5e-5)
    assert simple_goodput(1800, cost_s=0, mtbf_s=mtbf_s, lag_s=600) == pytest.approx(0.8507, abs=5e-5)


@pytest.mark.parametrize(("failures", "two_hours", "half_hour"), [(8.6, 64.17, 91.04), (7.76, 67.7, 91.9)])
def test_the_arithmetic_of_llama_3(failures: float, two_hours: float, half_hour: float) -> None:
    for interval_s, percent in ((7200, two_hours), (1800, half_hour)):
        assert 100 * simple_goodput(interval_s, cost_s=0, mtbf_s=DAY / failures) == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(
    ("interval_s", "lag_s", "lost_s"), [(24 * HOUR, 0, 12 * HOUR), (1800, 0, 900), (1800, 600, 1500)]
)
def test_a_failure_costs_half_an_interval_and_the_lag(interval_s: float, lag_s: float, lost_s: float) -> None:
    mtbf_s = 100 * DAY
    goodput = simple_goodput(interval_s, cost_s=0, mtbf_s=mtbf_s, lag_s=lag_s)
    assert (1 - goodput) * mtbf_s == pytest.approx(lost_s)


@pytest.mark.parametrize(("interval_s", "lost_h_per_day"), [(7200, 8.6), (1800, 2.15)])
def test_what_llama_3_lost_a_day(interval_s: float, lost_h_per_day: float) -> None:
    assert 24 * (1 - simple_goodput(interval_s, cost_s=0, mtbf_s=DAY / 8.6)) == pytest.approx(lost_h_per_day)


def test_608_devices_that_fail_every_1_9_hours_let_a_job_on_32_of_them_run_36_1_hours() -> None:
    hours_per_device = 1.9 * 608
    assert hours_per_device == pytest.approx(1155, abs=0.5)
    chance = chance_of_failure(32, 36.1 / 24, failures_per_device_year=365 * 24 / hours_per_device)
    assert chance == pytest.approx(1 - math.exp(-1), abs=5e-4)  # one failure is expected in that time


@pytest.mark.parametrize(("devices", "percent", "by_rate"), [(256, 19.06, 18.97), (1024, 57.08, 56.90)])
def test_chance_of_a_failure_in_thirty_days(devices: int, percent: float, by_rate: float) -> None:
    assert 100 * chance_of_any(devices * 30 / 365, 0.01) == pytest.approx(percent, abs=5e-3)
    assert 100 * chance_of_failure(devices, 30, failures_per_device_year=0.01) == pytest.approx(by_rate, abs=5e-3)


def test_the_measured_rate_of_llama_3_makes_a_failure_nearly_certain() -> None:
    for interruptions, rate in ((466, 0.192), (419, 0.173)):
        _, mtbf_s, _ = mean_time_between_failures(interruptions, 54 * DAY)
        assert 365 * DAY / (mtbf_s * 16_384) == pytest.approx(rate, abs=5e-4)
    assert 100 * chance_of_failure(256, 30, failures_per_device_year=0.173) == pytest.approx(97.4, abs=0.05)


@pytest.mark.parametrize(("ranks", "percent"), [(1024, 9.7), (16_384, 80.6)])
def test_a_rare_hiccup_of_one_rank_is_a_common_one_of_the_collective(ranks: int, percent: float) -> None:
    assert 100 * chance_of_any(ranks, 1e-4) == pytest.approx(percent, abs=0.05)


def test_the_confidence_of_few_failures_is_wide_and_that_of_many_narrow() -> None:
    # Garwood's interval: 5 events, 90 %: 1.970 to 10.513.
    low, best, high = mean_time_between_failures(5, 1000)
    assert (1000 / high, best, 1000 / low) == pytest.approx((1.970, 200, 10.513), abs=1e-3)
    low, best, high = mean_time_between_failures(0, 1000)
    assert (best, high) == (math.inf, math.inf)
    assert low == pytest.approx(1000 / -math.log(0.05), rel=1e-6)
    low, best, high = mean_time_between_failures(500, 500_000)
    assert high / low < 1.2


def test_it_says_when_the_restart_or_the_lag_dominates() -> None:
    common = {"num_failures": 10, "exposure_s": 10 * 10_000}
    assert "restart dominates" in advise(cost_s=1, lag_s=10, restart_s=2000, **common).verdict
    assert "durable dominates" in advise(cost_s=1, lag_s=3000, restart_s=100, **common).verdict
    assert advise(cost_s=60, lag_s=5, restart_s=100, current_s=9000, **common).verdict == "save more often"
    assert advise(cost_s=60, lag_s=5, restart_s=100, current_s=100, **common).verdict == "save less often"


def test_before_any_failure_only_what_never_pays_is_advised() -> None:
    advice = advise(cost_s=10, lag_s=20, restart_s=0, num_failures=0, exposure_s=30_000, current_s=1000)
    assert advice.mtbf_s[1:] == (math.inf, math.inf)
    assert advice.interval_s[0] == exact_interval(cost_s=10, mtbf_s=advice.mtbf_s[0]) == pytest.approx(441, abs=1)
    assert advice.interval_s[1:] == (math.inf, math.inf)
    assert (advice.goodput_now, advice.goodput_best, advice.loss_shares) == (None, None, {})
    assert advice.verdict == "no failure was seen yet"
    often = advise(cost_s=10, lag_s=20, restart_s=0, num_failures=0, exposure_s=30_000, current_s=60)
    assert often.verdict == "save less often"


def test_the_lag_undoes_as_much_as_a_longer_restart_and_no_interval_is_shorter_than_it() -> None:
    model = {"cost_s": 60, "mtbf_s": 10_000}
    with_lag = exact_goodput(1800, lag_s=600, restart_s=300, **model)
    assert with_lag == pytest.approx(exact_goodput(1800, restart_s=900, **model))
    assert with_lag < exact_goodput(1800, restart_s=300, **model) - 0.03
    # The best interval for a save of 1 s and 10,000 s between failures is 141 s, and such a save takes 3,000 s.
    advice = advise(cost_s=1, lag_s=3000, restart_s=100, num_failures=10, exposure_s=100_000)
    assert advice.exact_s == pytest.approx(141, abs=1)
    assert advice.interval_s[1] == 3000


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be negative"):
        advise(cost_s=-1, lag_s=0, restart_s=0, num_failures=0, exposure_s=1)


@given(st.floats(0.01, 1000), st.floats(10, 1e7), st.floats(0.01, 100))
def test_no_interval_beats_the_exact_one(cost_s: float, mtbf_s: float, factor: float) -> None:
    best = exact_interval(cost_s=cost_s, mtbf_s=mtbf_s)
    here = exact_goodput(best, cost_s=cost_s, mtbf_s=mtbf_s)
    assert here >= exact_goodput(best * factor, cost_s=cost_s, mtbf_s=mtbf_s) * (1 - 1e-9)
