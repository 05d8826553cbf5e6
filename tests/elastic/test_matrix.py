"""Hundreds of random jobs, cut and resumed on other ranks, workers and batch sizes.

``CACHELOADER_MATRIX=5000`` runs as many, and a tenth as many with forked workers; ``CACHELOADER_MATRIX_FIRST=17``
starts at another case, to see a failed one alone.
"""

import os
from collections.abc import Iterator

import pytest

from tests.elastic.cases import case
from tests.elastic.jobs import Job
from tests.support.memory_sets import MemorySets

NUM_CASES = int(os.environ.get("CACHELOADER_MATRIX", "500"))
NUM_FORKED = NUM_CASES // 10 if "CACHELOADER_MATRIX" in os.environ else 8
FIRST = int(os.environ.get("CACHELOADER_MATRIX_FIRST", "0"))
CHUNK = 20


@pytest.fixture(scope="module")
def sets() -> Iterator[MemorySets]:
    with MemorySets().installed() as sets:
        yield sets


def run(number: int, sets: MemorySets, *, max_world_size: int = 16, max_workers: int = 0) -> None:
    drawn = case(number, max_world_size=max_world_size, max_workers=max_workers)
    try:
        Job(drawn, sets).run()
    except Exception as error:
        error.add_note(f"in {drawn}")
        raise
    finally:
        sets.remove(f"mem://{number}/")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("first", range(FIRST, FIRST + NUM_CASES, CHUNK))
def test_any_history_of_ranks_and_batches_delivers_the_steps_of_the_uninterrupted_run(
    first: int, sets: MemorySets
) -> None:
    for number in range(first, min(first + CHUNK, FIRST + NUM_CASES)):
        run(number, sets)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("number", range(FIRST, FIRST + NUM_FORKED))
def test_forked_workers_change_nothing(number: int, sets: MemorySets) -> None:
    run(number, sets, max_world_size=3, max_workers=3)


def test_the_cases_reach_what_they_are_about() -> None:
    cases = [case(number) for number in range(500)]
    hops = [(before, after) for c in cases for before, after in zip(c.legs, c.legs[1:], strict=False)]
    worlds = [(before.world_size, after.world_size) for before, after in hops]
    assert {size for pair in worlds for size in pair} == set(range(1, 17))
    assert sum(max(pair) % min(pair) != 0 for pair in worlds) > 300
    assert sum(before.global_batch != after.global_batch for before, after in hops) > 300
    assert sum(c.lanes % leg.world_size != 0 and leg.world_size % c.lanes != 0 for c in cases for leg in c.legs) > 100
    assert {c.tail for c in cases} == {"drop", "pad", "keep"}
    assert sum(0 in c.samples_per_shard for c in cases) > 200
    assert sum(c.leaves_out for c in cases) > 100
