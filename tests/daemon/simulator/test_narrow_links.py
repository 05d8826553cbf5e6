"""Over links of every width: an epoch takes hardly longer than the link needs for what the cache cannot hold."""

from __future__ import annotations

import pytest
from cacheloader_daemon.simulator.forecast import forecast
from cacheloader_daemon.simulator.settings import Settings

SHARDS_PER_S = 5.0
MIB = 2**20


@pytest.mark.parametrize("bandwidth", [0.1, 0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("answers", ["steady", "heavy-tailed"])
@pytest.mark.parametrize("cached", [0.25, 0.5, 0.75, 0.9])
def test_an_epoch_takes_at_most_a_twentieth_longer_than_the_least_possible(
    cached: float, answers: str, bandwidth: float
) -> None:
    # The edge of an epoch costs two shards: of few that are missing, that is a large part.
    num_shards = 800 if cached == 0.9 else 500
    latency_s, latency_sigma = (0.2, 1.0) if answers == "heavy-tailed" else (0.03, 0.0)
    found = forecast(
        Settings(
            num_shards=num_shards,
            shard_bytes=MIB,
            samples_per_shard=4,
            cache_bytes=int(cached * num_shards) * MIB,
            samples_per_s=4 * SHARDS_PER_S,
            bandwidth_bytes_per_s=bandwidth * SHARDS_PER_S * MIB,
            latency_s=latency_s,
            latency_sigma=latency_sigma,
            check_s=0.005,
            batch_size=4,
            shuffle_window=2,
        )
    )
    assert found.origin_bytes_per_epoch <= 1.03 * (found.least_origin_bytes_per_epoch + found.window_bytes)
    assert (1 + found.stall) / (1 + found.least_stall) - 1 <= 0.05
