"""The audit against simulated jobs whose truth is known, and against the same records with one thing changed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheloader import state
from cacheloader.audit.folder import MAX_LAG_STEPS, audit
from cacheloader.errors import ConfigError
from cacheloader.manifest.record import Manifest, ShardInfo
from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder
from cacheloader.steps import Begin, Recorded, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.audit.report import Audit

LANES = 2


@dataclass
class Simulation:
    """A job of ranks that take steps in turn, die, and go on from a checkpoint; writes what a real one would."""

    counts: list[int]
    tail: str = "keep"
    with_keys: bool = True
    records: list[Begin | Step] = field(default_factory=list)
    epoch: int = 0
    row: int = 0
    num_attempts: int = 0

    def __post_init__(self) -> None:
        shards = [
            ShardInfo(uri=f"mem://b/{i}.tar", size_bytes=1, version="", num_samples=n)
            for i, n in enumerate(self.counts)
        ]
        self.manifest = Manifest.build(shards, format="webdataset", origin_id="mem")
        self.options = OrderOptions(seed=3, lanes=LANES, shuffle_window=2, tail=self.tail)
        self.order = SampleOrder(self.manifest.num_samples, self.options)
        self.first_number = np.cumsum(self.counts) - self.counts

    def attempt(self, *, world: int, global_batch: int, num_steps: int, kept: int, cut_ranks: int = 0) -> None:
        """Take ``num_steps`` steps, of which the checkpoint knows ``kept``; ``cut_ranks`` missed the last one."""
        self.num_attempts += 1
        common = {"attempt": f"a{self.num_attempts}", "world_size": world, "global_batch": global_batch}
        logs: list[list[Begin | Step]] = [[] for _ in range(world)]
        epoch, row = self.epoch, self.row
        if row and not self.order.steps_remaining(row=row, global_batch=global_batch):
            epoch, row = epoch + 1, 0
        saved = (self.epoch, self.row)

        def begin(at: tuple[int, int]) -> None:
            for rank, log in enumerate(logs):
                log.append(
                    Begin(
                        **common,
                        rank=rank,
                        seq=len(log),
                        wall_ns=self.num_attempts * 10**9 + rank,
                        epoch=at[0],
                        row=at[1],
                        num_workers=0,
                        manifest=self.manifest.digest,
                        order={**state.order_fields(self.options), "layout": "of no concern"},
                    )
                )

        begin(saved)  # the place that was loaded, even if what is left there fills no step
        for number in range(num_steps):
            for rank, log in enumerate(logs):
                if number == num_steps - 1 and rank < cut_ranks:
                    continue
                places = self.order.batch(epoch=epoch, row=row, global_batch=global_batch, rank=rank, world_size=world)
                if len(places):
                    keys = (self.first_number[places.shard] + places.sample).tolist()
                    log.append(
                        Step(
                            **common,
                            rank=rank,
                            seq=len(log),
                            epoch=epoch,
                            row=row,
                            rows=global_batch // LANES,
                            num_samples=len(places),
                            num_skipped=0,
                            num_bad=0,
                            keys=tuple(keys) if self.with_keys else None,
                        )
                    )
            row += global_batch // LANES
            if not self.order.steps_remaining(row=row, global_batch=global_batch):
                epoch, row = epoch + 1, 0
                if number < num_steps - 1:
                    begin((epoch, row))
            if number < kept:
                saved = (epoch, row)
        self.epoch, self.row = saved
        self.records += [record for log in logs for record in log]

    def audit(self, records: list[Begin | Step] | None = None) -> Audit:
        records = sorted(self.records if records is None else records, key=lambda r: (r.attempt, r.rank, r.seq))
        return audit(Recorded(records=records), lambda digest: self.manifest)


attempts = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 4, 6]),
        st.sampled_from([12, 24]),
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda counts: sum(counts) >= 24),
    tail=st.sampled_from(["drop", "pad", "keep"]),
    with_keys=st.booleans(),
    attempts=attempts,
)
def test_a_job_that_resumed_rightly_has_no_findings(
    counts: list[int], tail: str, with_keys: bool, attempts: list[tuple[int, int, int, int, int]]
) -> None:
    job = Simulation(counts=counts, tail=tail, with_keys=with_keys)
    for world, global_batch, num_steps, kept, cut in attempts:
        # Only steps that every rank got can be in a checkpoint.
        whole = num_steps - (1 if cut else 0)
        job.attempt(
            world=world,
            global_batch=global_batch,
            num_steps=num_steps,
            kept=min(kept, whole),
            cut_ranks=min(cut, world),
        )
    answer = job.audit()
    assert answer.findings == []
    assert answer.world_sizes == [attempt[0] for attempt in attempts]
    for epoch in answer.epochs:
        assert (epoch.num_repeats, epoch.num_gaps) == (0, 0)
        if epoch.is_complete:
            assert epoch.num_once + epoch.num_dropped == sum(counts)
            assert epoch.num_dropped == 0 or tail == "drop"


@pytest.fixture
def job() -> Simulation:
    """Two and a half epochs of 200 samples, killed once in between: steps of 6 rows, 17 an epoch, a short last one."""
    job = Simulation(counts=[50, 70, 30, 50])
    job.attempt(world=2, global_batch=12, num_steps=20, kept=18)
    job.attempt(world=3, global_batch=12, num_steps=24, kept=24)
    assert job.audit().findings == []
    return job


def find(records: list[Begin | Step], **wanted: Any) -> Step:
    steps = [r for r in records if isinstance(r, Step) and all(getattr(r, name) == v for name, v in wanted.items())]
    return steps[0]


def kinds(answer: Audit) -> set[str]:
    return {finding.kind for finding in answer.findings}


def test_the_report_counts_what_happened(job: Simulation) -> None:
    answer = job.audit()
    assert [(e.epoch, e.is_complete, e.num_steps, e.num_once) for e in answer.epochs] == [
        (0, True, 17, 200),
        (1, True, 17, 200),
        (2, False, 8, 96),
    ]
    assert answer.num_rolled_back == 2 * 2
    assert answer.has_keys


def test_a_step_that_one_rank_never_got_is_a_gap_and_the_samples_are_named(job: Simulation) -> None:
    lost = find(job.records, attempt="a2", epoch=1, row=60, rank=1)
    answer = job.audit([record for record in job.records if record is not lost])
    assert kinds(answer) == {"rank", "gap"}
    assert answer.num_gaps == 4
    (gap,) = [finding for finding in answer.findings if finding.kind == "gap"]
    assert "4 samples of epoch 1 were delivered never" in gap.text
    named = {int(job.first_number[int(uri[len("mem://b/") : -4])]) + index for uri, index in gap.samples}
    assert lost.keys is not None
    assert named == set(lost.keys)


def test_a_whole_step_that_is_missing_is_a_gap(job: Simulation) -> None:
    answer = job.audit([r for r in job.records if not (isinstance(r, Step) and (r.epoch, r.row) == (0, 24))])
    assert kinds(answer) == {"gap"}
    assert answer.num_gaps == 12
    assert "rows 24 to 30 of epoch 0 are in no step" in answer.findings[0].text


def test_a_step_delivered_twice_by_one_attempt_is_a_repeat(job: Simulation) -> None:
    again = replace(find(job.records, attempt="a2", epoch=1, row=60, rank=1), seq=999)
    answer = job.audit([*job.records, again])
    assert kinds(answer) == {"repeat"}
    assert answer.num_repeats == 4


@pytest.mark.parametrize(("shift", "kind", "count"), [(6, "gap", 12), (-6, "repeat", 12)])
def test_a_resume_one_step_off_the_checkpoint_is_found(shift: int, kind: str, count: int) -> None:
    """The silent failure that all this is about; that of a repeat needs a begin that claims the right place."""
    job = Simulation(counts=[50, 70, 30, 50])
    job.attempt(world=2, global_batch=12, num_steps=8, kept=8)
    job.row += shift
    job.attempt(world=3, global_batch=12, num_steps=5, kept=5)
    records = [
        replace(record, row=48) if isinstance(record, Begin) and record.attempt == "a2" and shift < 0 else record
        for record in job.records
    ]
    answer = job.audit(records)
    assert kind in kinds(answer)
    assert (answer.num_gaps if kind == "gap" else answer.num_repeats) == count


def test_ranks_that_resume_at_different_places_are_found(job: Simulation) -> None:
    records = [
        replace(r, row=r.row + 6) if isinstance(r, Begin) and (r.attempt, r.rank, r.seq) == ("a2", 1, 0) else r
        for r in job.records
    ]
    assert "began iteration 0 each with another place" in job.audit(records).findings[0].text


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda step: replace(step, num_samples=step.num_samples - 1), "count"),
        (lambda step: replace(step, keys=(*step.keys[1:], (step.keys[0] + 1) % 200)), "key"),
        (lambda step: replace(step, rows=12), "rank"),
        (lambda step: replace(step, row=5000), "order"),
    ],
)
def test_a_record_that_contradicts_the_order_is_found(
    job: Simulation, change: Callable[[Step], Step], kind: str
) -> None:
    victim = find(job.records, attempt="a1", epoch=0, row=24, rank=1)
    answer = job.audit([change(record) if record is victim else record for record in job.records])
    assert kind in kinds(answer)


def test_skipped_and_bad_samples_count_as_delivered_places(job: Simulation) -> None:
    victim = find(job.records, attempt="a1", epoch=0, row=24, rank=1)
    changed = replace(victim, num_samples=victim.num_samples - 3, num_skipped=2, num_bad=1)
    answer = job.audit([changed if record is victim else record for record in job.records])
    assert answer.findings == []
    assert (answer.epochs[0].num_skipped, answer.epochs[0].num_bad) == (2, 1)


def test_a_position_that_no_step_led_to_is_a_gap() -> None:
    job = Simulation(counts=[50, 70, 30, 50])
    job.attempt(world=2, global_batch=12, num_steps=4, kept=4)
    job.row += 12
    job.attempt(world=2, global_batch=12, num_steps=0, kept=0)
    answer = job.audit()
    assert "went on at row 36 of epoch 0" in answer.findings[0].text
    assert answer.num_gaps == 24


def test_an_epoch_that_was_left_early_for_the_next_is_a_gap() -> None:
    job = Simulation(counts=[50, 70, 30, 50])
    job.attempt(world=2, global_batch=12, num_steps=4, kept=4)
    job.epoch, job.row = 1, 0
    job.attempt(world=2, global_batch=12, num_steps=4, kept=4)
    answer = job.audit()
    assert "epoch 0 ends at row 24, and 76 more were due" in answer.findings[0].text
    assert answer.num_gaps == 200 - 48


def test_records_that_start_in_the_middle_of_an_epoch_prove_nothing_of_what_was_before() -> None:
    job = Simulation(counts=[50, 70, 30, 50], row=24)
    job.attempt(world=2, global_batch=12, num_steps=20, kept=20)
    answer = job.audit()
    assert [finding.text for finding in answer.findings] == [
        "rows 0 to 24 of epoch 0 are not recorded: the records start there"
    ]
    assert answer.num_gaps == 0


@pytest.mark.parametrize(("lag", "is_found"), [(MAX_LAG_STEPS, False), (MAX_LAG_STEPS + 1, True)])
def test_a_rank_whose_records_end_long_before_the_others_is_found(lag: int, is_found: bool) -> None:
    job = Simulation(counts=[5000], with_keys=False)
    job.attempt(world=2, global_batch=12, num_steps=100, kept=100)
    rows = {6 * number for number in range(100 - lag, 100)}
    records = [r for r in job.records if not (isinstance(r, Step) and r.rank == 1 and r.row in rows)]
    answer = job.audit(records)
    assert answer.num_in_flight == lag
    assert bool(answer.findings) == is_found


def test_attempts_are_ordered_by_time_not_by_name(job: Simulation) -> None:
    names = {"a1": "zebra", "a2": "ape"}
    answer = job.audit([replace(record, attempt=names[record.attempt]) for record in job.records])
    assert (answer.findings, answer.world_sizes) == ([], [2, 3])


def test_an_order_changed_within_an_epoch_is_no_one_epoch(job: Simulation) -> None:
    records = [
        replace(record, order={**record.order, "seed": 4})
        if isinstance(record, Begin) and record.attempt == "a2"
        else record
        for record in job.records
    ]
    assert "order" in kinds(job.audit(records))


def test_an_order_of_another_release_is_refused(job: Simulation) -> None:
    records = [replace(r, order={**r.order, "order_version": 99}) if isinstance(r, Begin) else r for r in job.records]
    with pytest.raises(ConfigError, match="version 99"):
        job.audit(records)


def test_damage_inside_a_file_is_a_finding(job: Simulation) -> None:
    recorded = Recorded(records=job.records, damaged=["steps-x.jsonl:7: no JSON"])
    recorded.records.sort(key=lambda r: (r.attempt, r.rank, r.seq))
    assert kinds(audit(recorded, lambda digest: job.manifest)) == {"file"}


def test_the_order_of_attempts_that_left_no_step_does_not_matter() -> None:
    rng = random.Random(1)
    job = Simulation(counts=[50, 70, 30, 50])
    for _ in range(8):
        steps = rng.choice([0, 0, 3])
        job.attempt(world=rng.choice([1, 2, 4]), global_batch=12, num_steps=steps, kept=steps)
    assert job.audit().findings == []
