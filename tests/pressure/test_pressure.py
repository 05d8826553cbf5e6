"""A cache smaller than the data, with a real store, link, daemon and loader; see ``python -m benchmarks.pressure``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.pressure.measuring import Case, measure
from benchmarks.pressure.report import allowed_bytes
from benchmarks.pressure.stage import Shape, Stocked, stock
from cacheloader.demo.seaweedfs import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

# Seconds on a quiet machine; it goes through some hundred shards with four processes.
pytestmark = pytest.mark.timeout(400)

SHAPE = Shape(num_shards=80, samples_per_shard=2, sample_bytes=128 * 1024 - 512)


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stocked]:
    folder = tmp_path_factory.mktemp("s")
    server = SeaweedServer(folder)
    server.start()
    try:
        yield stock(server, SHAPE)
    finally:
        server.stop()


def test_one_job_reads_what_the_cache_cannot_hold_and_the_simulator_knew(
    stocked: Stocked, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("p") / "one"
    found = measure(folder, stocked, Case(name="", cached=0.5, epoch_s=0.8, num_epochs=3))
    assert found.samples == 3 * SHAPE.num_samples
    assert 0.45 < found.cached_bytes / found.dataset_bytes < 0.55
    assert found.window_bytes < 5 * stocked.shard_bytes, "four shards; of a larger cache a sixty-fourth"
    # What is on its way at the edges of the two epochs is a shard or two of forty.
    assert found.bytes_per_epoch <= allowed_bytes(found) + 2 * stocked.shard_bytes
    assert found.simulated_bytes == pytest.approx(found.bytes_per_epoch, rel=0.1)


def test_two_jobs_with_seeds_of_their_own_hit_more_than_a_fixed_set_would(
    stocked: Stocked, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("p") / "two"
    found = measure(folder, stocked, Case(name="", cached=0.5, epoch_s=0.8, num_epochs=3, num_jobs=2))
    assert found.samples == 2 * 3 * SHAPE.num_samples
    assert found.hit_rate > 0.6
    # The simulator draws orders of its own: over eighty shards two pairs of them differ by more than over many.
    assert found.simulated_bytes == pytest.approx(found.bytes_per_epoch, rel=0.25)
