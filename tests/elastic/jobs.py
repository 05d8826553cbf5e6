"""Runs a job of ``cases`` leg by leg, all ranks in one process, and compares each step with the uninterrupted order."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch.utils.data

import cacheloader as cl
from tests.support.draws import key_and_draws

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.elastic.cases import Case, Leg
    from tests.support.memory_sets import MemorySets

Drawn = tuple[Any, ...]
Rows = list[list[Drawn]]


class Broken(Exception):
    """What the transform raises on some samples."""


def drawn(sample: dict[str, Any], rng: Any) -> Drawn:
    """Whether the place is padding, the key, and what chance gave."""
    return sample.get("__pad__", False), *key_and_draws(sample, rng)


def drawn_if_good(sample: dict[str, Any], rng: Any) -> Any:
    """As ``drawn``, but a fifth of the samples is skipped and a fifth is broken."""
    match crc32(sample["__key__"].encode()) % 5:
        case 0:
            return cl.SKIP
        case 1:
            raise Broken
    return drawn(sample, rng)


class Job:
    """A job that starts at the first sample and is cut after every leg."""

    def __init__(self, case: Case, sets: MemorySets) -> None:
        self._case = case
        self._url = f"mem://{case.seed}/"
        sets.add(self._url, case.samples_per_shard)
        self._expected: Callable[[int], Rows] = cache(self._rows)

    def run(self) -> None:
        """Every leg; an AssertionError where a step is not what it should be."""
        saved: dict[str, Any] | None = None
        epoch = row = 0
        for leg in self._case.legs:
            if not self._steps_left(leg, row):
                epoch, row = epoch + 1, 0  # what is left fills no batch of this size
            saved, epoch, row = self._run(leg, saved, epoch, row)
            assert (saved["epoch"], saved["row"]) == (epoch, row), leg

    def _run(self, leg: Leg, saved: dict[str, Any] | None, epoch: int, row: int) -> tuple[dict[str, Any], int, int]:
        ranks = [
            _Rank(partial(self._open, rank=rank, world_size=leg.world_size), leg) for rank in range(leg.world_size)
        ]
        for rank in ranks:
            rank.begin(saved)
        is_edge = False
        for _ in range(leg.steps):
            batches = [rank.step() for rank in ranks]
            if is_edge:
                assert batches == [None] * leg.world_size, "the epoch should have been over"
                for rank in ranks:
                    rank.begin(None)
                batches = [rank.step() for rank in ranks]
            self._compare(leg, batches, epoch, row)
            row += leg.global_batch // self._case.lanes
            is_edge = not self._steps_left(leg, row)
            if is_edge:
                epoch, row = epoch + 1, 0
        # With tail="keep" a rank may have had no part in the last step, and cannot know that it is over.
        states = [rank.state() for rank in ranks[: 1 if is_edge and self._case.tail == "keep" else None]]
        assert all(state == states[0] for state in states)
        return states[0], epoch, row

    def _compare(self, leg: Leg, batches: list[list[Drawn] | None], epoch: int, row: int) -> None:
        assert None not in batches or self._case.tail == "keep", "a rank had nothing"
        sizes = {len(batch) for batch in batches if batch is not None}
        assert max(sizes) <= leg.batch_size
        if self._case.tail != "keep" and not self._case.leaves_out:
            assert sizes == {leg.batch_size}
        rows = self._expected(epoch)
        got = [sample for batch in batches if batch is not None for sample in batch]
        wanted = [sample for part in rows[row : row + leg.global_batch // self._case.lanes] for sample in part]
        assert Counter(sample for sample in got if not sample[0]) == Counter(
            sample for sample in wanted if not sample[0]
        )
        first_readings = {sample[1:] for part in rows for sample in part if not sample[0]}
        assert {sample[1:] for sample in got if sample[0]} <= first_readings

    def _steps_left(self, leg: Leg, row: int) -> bool:
        rows = self._case.num_samples / self._case.lanes - row
        return rows >= leg.global_batch // self._case.lanes if self._case.tail == "drop" else rows > 0

    def _rows(self, epoch: int) -> Rows:
        """Row by row what one process gets that runs through."""
        dataset = self._open(rank=0, world_size=1)
        dataset.set_epoch(epoch)
        return list(cl.DataLoader(dataset, batch_size=self._case.lanes, collate_fn=list))

    def _open(self, **world: Any) -> cl.RemoteDataset:
        case = self._case
        return cl.RemoteDataset(
            self._url,
            seed=case.seed,
            lanes=case.lanes,
            shuffle=case.shuffle,
            shuffle_window=case.shuffle_window,
            redeal=case.redeal,
            tail=case.tail,
            transform=drawn_if_good if case.leaves_out else drawn,
            on_bad_sample="skip",
            max_bad_samples=10**6,
            **world,
        )


class _Rank:
    """One rank during one leg."""

    def __init__(self, open_dataset: Callable[[], cl.RemoteDataset], leg: Leg) -> None:
        self._dataset = open_dataset()
        options: dict[str, Any] = {
            "batch_size": leg.batch_size,
            "num_workers": leg.num_workers,
            "collate_fn": list,
        }
        self._ours: cl.DataLoader | None = None
        if leg.loop == "ours":
            self._ours = cl.DataLoader(self._dataset, **options)
        else:
            self._dataset.set_batch_size(leg.batch_size)
            self._theirs = torch.utils.data.DataLoader(self._dataset, **options)
        self._taken = 0

    def begin(self, saved: dict[str, Any] | None) -> None:
        if saved is not None:
            (self._ours or self._dataset).load_state_dict(saved)
        self._batches = iter(self._ours or self._theirs)
        self._taken = 0

    def step(self) -> list[Drawn] | None:
        batch = next(self._batches, None)
        self._taken += batch is not None
        return batch

    def state(self) -> dict[str, Any]:
        return self._ours.state_dict() if self._ours else self._dataset.state_dict(batches=self._taken)
