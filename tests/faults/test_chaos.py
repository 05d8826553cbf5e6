"""The short form of the chaos run; ``python -m tests.chaos --events 300`` is the long one.

CACHELOADER_TEST_CHAOS=300 makes this one long, CACHELOADER_TEST_SEED repeats its plan.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from tests.chaos.run import ChaosRun

if TYPE_CHECKING:
    from pathlib import Path

NUM_EVENTS = int(os.environ.get("CACHELOADER_TEST_CHAOS", "8"))
SEED = int(os.environ.get("CACHELOADER_TEST_SEED", random.SystemRandom().randrange(10**6)))


@pytest.mark.slow
@pytest.mark.timeout(600 + 60 * NUM_EVENTS)
def test_a_job_broken_at_random_delivers_every_sample_once_and_right_and_leaves_nothing_behind(tmp_path: Path) -> None:
    print(f"seed {SEED}, {NUM_EVENTS} events")
    summary = ChaosRun(tmp_path, num_events=NUM_EVENTS, seed=SEED, say=print).run()
    print("\n".join(summary.lines()))
    assert summary.is_clean
    assert summary.verdict.epochs >= 1
