"""The planner in virtual time: what it fetches and how long jobs wait, against what no policy can beat."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from math import log

import pytest
from cacheloader_daemon.simulator.__main__ import main
from cacheloader_daemon.simulator.forecast import forecast
from cacheloader_daemon.simulator.settings import Settings

from cacheloader.errors import ConfigError

MIB = 2**20
NODE = Settings(
    num_shards=400,
    shard_bytes=MIB,
    samples_per_shard=100,
    cache_bytes=200 * MIB,
    samples_per_s=1000.0,
    bandwidth_bytes_per_s=30.0 * MIB,
    shuffle_window=2,
    batch_size=50,
)


@pytest.mark.parametrize("cached", [0.25, 0.5, 0.75, 0.9])
def test_one_job_reads_hardly_more_than_what_the_cache_cannot_hold(cached: float) -> None:
    settings = replace(NODE, cache_bytes=int(cached * 400) * MIB)
    found = forecast(settings)
    assert found.window_bytes <= 0.05 * settings.cache_bytes
    assert found.origin_bytes_per_epoch <= 1.03 * (found.least_origin_bytes_per_epoch + found.window_bytes)
    assert found.stall < 0.01


@pytest.mark.parametrize("cached", [0.25, 0.5, 0.75])
def test_lru_is_as_bad_as_arithmetic_says(cached: float) -> None:
    found = forecast(replace(NODE, cache_bytes=int(cached * 400) * MIB, eviction="lru", num_epochs=5))
    assert found.hit_rate == pytest.approx(cached + (1 - cached) * log(1 - cached), abs=0.03)


def test_jobs_with_seeds_of_their_own_share_most_fetches() -> None:
    assert forecast(replace(NODE, num_jobs=2)).hit_rate >= 0.68
    assert forecast(replace(NODE, num_jobs=2, eviction="lru")).hit_rate < 0.4


def test_a_heavy_tail_hides_behind_places_that_were_traded() -> None:
    slow = replace(NODE, latency_s=0.2, latency_sigma=1.0, lookahead_bytes=10 * MIB)
    assert forecast(slow).stall < 0.005


def test_a_link_that_is_too_narrow_waits_for_hardly_more_than_its_bytes() -> None:
    found = forecast(replace(NODE, num_shards=800, cache_bytes=400 * MIB, bandwidth_bytes_per_s=4.0 * MIB))
    needed = found.origin_bytes_per_epoch / (4.0 * MIB)
    assert found.epoch_s < 1.02 * needed
    assert found.stall < 1.2 * found.least_stall


def test_second_requests_take_most_of_the_waiting_out_of_a_heavy_tail() -> None:
    # Longer than what is fetched ahead can hide.
    slow = replace(NODE, latency_s=0.6, latency_sigma=1.0)
    plain, hedged = forecast(slow), forecast(replace(slow, hedge=True))
    assert plain.stall > 0.02
    assert hedged.stall < 0.6 * plain.stall
    assert hedged.requests_per_epoch < 1.08 * plain.requests_per_epoch


def test_a_few_very_late_answers_are_waited_for_unless_they_are_asked_for_again() -> None:
    late = replace(NODE, bandwidth_bytes_per_s=6.0 * MIB, latency_s=0.1, late_share=0.02, late_s=20.0)
    plain, hedged = forecast(late), forecast(replace(late, hedge=True))
    assert plain.stall > 0.05
    assert hedged.stall < 0.5 * plain.stall
    assert hedged.requests_per_epoch < 1.05 * plain.requests_per_epoch


def test_what_is_set_aside_for_shards_on_their_way_is_missing_for_those_that_stay() -> None:
    plain, careful = forecast(NODE), forecast(replace(NODE, reserve_bytes=2 * MIB))
    assert careful.origin_bytes_per_epoch > plain.origin_bytes_per_epoch
    assert careful.origin_bytes_per_epoch < 1.1 * plain.origin_bytes_per_epoch


def test_equal_settings_give_equal_answers_and_another_seed_another() -> None:
    settings = replace(NODE, num_shards=100, cache_bytes=50 * MIB, latency_sigma=1.0)
    assert forecast(settings) == forecast(settings)
    assert forecast(settings) != forecast(replace(settings, seed=18))


def test_ranks_share_the_cache_and_their_jobs_pace() -> None:
    found = forecast(replace(NODE, num_ranks=4, shuffle_window=1))
    assert found.epoch_s == pytest.approx(40.0, rel=0.02)
    assert found.hit_rate > 0.45


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_shards": 0}, "num_shards=0 is below 1"),
        ({"cache_bytes": 1.5}, "cache_bytes=1.5 is no int"),
        ({"samples_per_s": float("nan")}, "samples_per_s=nan is no number above 0"),
        ({"reserve_bytes": 5}, "reserve_bytes=5 is less than a shard of 1048576 bytes"),
        ({"late_share": 1.5}, "late_share=1.5 is more than all answers"),
        ({"eviction": "fifo"}, "none of plan, lru"),
        ({"num_ranks": 401}, "401 ranks cannot share 400 shards"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(NODE, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["[", "[1]", "{}", '{"num_shards": 1, "colour": 2}'])
def test_program_says_what_is_wrong_with_its_input(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(io.StringIO(text), io.StringIO()) == 2
    assert capsys.readouterr().err.strip()


def test_program_answers_with_plain_values() -> None:
    asked = {"num_shards": 50, "shard_bytes": 1000, "samples_per_shard": 100, "cache_bytes": 25_000}
    sink = io.StringIO()
    asked |= {"samples_per_s": 100.0, "bandwidth_bytes_per_s": 1e6, "remedy": True, "shuffle_window": 1}
    assert main(io.StringIO(json.dumps(asked)), sink) == 0
    answer = json.loads(sink.getvalue())
    assert answer["enough_cache_bytes"] == 25_000
