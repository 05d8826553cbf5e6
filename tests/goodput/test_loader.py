"""The loader tells the run what it waited for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import cacheloader as cl
from cacheloader.goodput import events
from cacheloader.goodput.folder import EventFolder
from tests.support.shard_sets import write_shards

if TYPE_CHECKING:
    from pathlib import Path


def test_a_long_wait_is_recorded_with_the_shard_that_was_waited_for_and_its_epoch(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", num_shards=2, samples_per_shard=8)

    def slow_in_the_second_shard(sample: dict[str, Any]) -> str:
        if sample["__key__"] == "sample0000008":
            time.sleep(0.2)
        return str(sample["__key__"])

    dataset = cl.RemoteDataset(str(shards.folder), shuffle=False, transform=slow_in_the_second_shard, daemon="none")
    loader = cl.DataLoader(dataset, batch_size=4)
    with cl.goodput.Run(tmp_path / "run", rank=0, world_size=1) as run:
        seen = [key for batch in loader for key in batch]
        assert run.last_step == 4
    assert len(seen) == 16
    steps = [event for event in EventFolder(tmp_path / "run").read() if isinstance(event, events.Step)]
    assert [(step.samples, step.epoch) for step in steps] == [(4, 0)] * 4
    assert steps[2].source == "shard-000001.tar"
    assert steps[2].fetch_s >= 0.2
    assert steps[3].source == "" or steps[3].fetch_s >= 0.1


def test_asking_the_daemon_to_watch_is_part_of_the_first_wait_for_a_batch(tmp_path: Path) -> None:
    class Loader:
        """A loader whose daemon answers late."""

        def watch_run(self, *_: Any, **__: Any) -> None:
            time.sleep(0.1)

    loader = Loader()
    with cl.goodput.Run(tmp_path / "run", rank=0, world_size=1) as run:
        run.fetching(loader)
        run.fetched(loader, 0.0, 1)
        run.step()
    [step] = [event for event in EventFolder(tmp_path / "run").read() if isinstance(event, events.Step)]
    assert step.dur_s >= step.fetch_s >= 0.1
