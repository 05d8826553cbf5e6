"""Whatever the sizes: the quota is kept, and one job reads no less than anybody could and hardly more."""

from __future__ import annotations

from itertools import pairwise

from cacheloader_daemon.simulator.node import SimulatedNode
from cacheloader_daemon.simulator.settings import Settings
from hypothesis import given, settings
from hypothesis import strategies as st

SHARD_BYTES = 1000
ROWS = 20


@settings(max_examples=25, deadline=None)
@given(
    num_shards=st.integers(30, 90),
    cached=st.floats(0.2, 0.95),
    shuffle_window=st.integers(1, 3),
    bandwidth=st.floats(0.3, 3.0),
    latency_sigma=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 5),
)
def test_one_job_reads_between_the_least_possible_and_a_little_more(
    num_shards: int, cached: float, shuffle_window: int, bandwidth: float, latency_sigma: float, seed: int
) -> None:
    node = SimulatedNode(
        Settings(
            num_shards=num_shards,
            shard_bytes=SHARD_BYTES,
            samples_per_shard=ROWS,
            cache_bytes=int(cached * num_shards) * SHARD_BYTES,
            samples_per_s=100.0,
            bandwidth_bytes_per_s=bandwidth * 100.0 / ROWS * SHARD_BYTES,
            latency_s=0.02,
            latency_sigma=latency_sigma,
            batch_size=10,
            shuffle_window=shuffle_window,
            num_epochs=4,
            seed=seed,
        )
    )
    moments = []
    for moment in node.run():
        moments.append(moment)
        node.planner.check_invariants()
    statistics = node.planner.statistics()
    capacity_bytes = int(cached * num_shards) * SHARD_BYTES
    assert statistics.resident_bytes + statistics.reserved_bytes <= capacity_bytes
    assert statistics.memory_serves == 0
    least_bytes = num_shards * SHARD_BYTES - capacity_bytes
    # What is in use takes space as well: two windows, where a batch crosses from one into the next.
    slack_bytes = statistics.lookahead_bytes + 2 * shuffle_window * SHARD_BYTES
    sent = [after.sent_bytes - before.sent_bytes for before, after in pairwise(moments)]
    # Single epochs lend each other what was fetched ahead at their edges.
    assert sum(sent) >= len(sent) * least_bytes - slack_bytes
    assert sum(sent) <= 1.03 * (len(sent) * (least_bytes + slack_bytes) + slack_bytes)
    assert moments[-1].read_bytes == 4 * num_shards * SHARD_BYTES


@settings(max_examples=10, deadline=None)
@given(num_jobs=st.integers(2, 3), num_ranks=st.integers(1, 3), cached=st.floats(0.3, 0.9), seed=st.integers(0, 5))
def test_jobs_that_share_a_data_set_read_less_than_each_alone_would(
    num_jobs: int, num_ranks: int, cached: float, seed: int
) -> None:
    node = SimulatedNode(
        Settings(
            num_shards=60,
            shard_bytes=SHARD_BYTES,
            samples_per_shard=ROWS,
            cache_bytes=int(cached * 60) * SHARD_BYTES,
            samples_per_s=100.0,
            bandwidth_bytes_per_s=20_000.0,
            num_jobs=num_jobs,
            num_ranks=num_ranks,
            batch_size=10,
            shuffle_window=1,
            num_epochs=4,
            seed=seed,
        )
    )
    moments = list(node.run())
    node.planner.check_invariants()
    assert node.planner.statistics().memory_serves == 0
    alone_bytes = num_jobs * 60 * SHARD_BYTES * (1 - cached)
    first = max(moment.sent_bytes for moment in moments[:num_jobs])
    assert (moments[-1].sent_bytes - first) / 3 <= 1.1 * alone_bytes + 6 * num_jobs * SHARD_BYTES
