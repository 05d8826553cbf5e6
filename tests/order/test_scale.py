from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder

SHARDS = 100_000
SAMPLES = 1_000_000_000
ROOT = Path(__file__).parents[2]

# VmHWM and not ru_maxrss: the latter starts at what the process was before exec, which is all of pytest.
FIRST_BATCHES = """
import sys
import numpy as np
from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder

def peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

lanes, world_size = int(sys.argv[1]), int(sys.argv[2])
sizes = np.random.default_rng(0).integers(5_000, 15_001, {shards})
sizes[-1] += {samples} - sizes.sum()
SampleOrder(np.full(3, 2000), OrderOptions()).batch(epoch=0, row=0, global_batch=1, rank=0, world_size=1)
before = peak_bytes()
order = SampleOrder(sizes, OrderOptions(seed=1, lanes=lanes))
batch = 8192 * world_size
for row in (0, order.full_rows // 2):
    assert len(order.batch(epoch=1, row=row, global_batch=batch, rank=0, world_size=world_size)) == 8192
order.accesses(epoch=1, from_row=0, global_batch=batch, rank=0, world_size=world_size)
assert order.num_samples == {samples}
print(peak_bytes() - before)
"""


@pytest.mark.parametrize(("lanes", "world_size"), [(1, 1), (8, 8), (1024, 1), (1024, 1024)])
def test_a_billion_samples_in_a_hundred_thousand_shards_cost_less_than_200_megabytes(lanes, world_size):
    script = FIRST_BATCHES.format(shards=SHARDS, samples=SAMPLES)
    ran = subprocess.run(
        [sys.executable, "-c", script, str(lanes), str(world_size)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )

    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 200_000_000


@pytest.mark.parametrize("samples_per_shard", [10_000, 1_000_000])
def test_a_batch_allocates_by_its_own_size_and_not_by_that_of_its_window(samples_per_shard):
    order = SampleOrder(np.full(64, samples_per_shard), OrderOptions(lanes=4))
    where = {"epoch": 0, "global_batch": 256, "rank": 0, "world_size": 1}
    order.batch(row=0, **where)
    tracemalloc.start()
    try:
        order.batch(row=samples_per_shard * 12, **where)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 200_000
