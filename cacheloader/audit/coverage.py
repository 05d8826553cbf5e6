"""Which samples of an epoch its steps delivered, counted one by one with the order computed again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.audit.report import EpochAudit, Finding
from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from cacheloader.audit.history import KeptStep
    from cacheloader.manifest.record import Manifest
    from cacheloader.order.places import Places
    from cacheloader.order.sample_order import SampleOrder
    from cacheloader.steps import Step

_LISTED_SAMPLES = 1000
_SAMPLES_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A data set and its order.

    Attributes:
        manifest: The shards.
        order: Which sample comes when.
        first_number: int64 [shards]; the data set's samples are numbered through the manifest.
    """

    manifest: Manifest
    order: SampleOrder
    first_number: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        counts = self.manifest.num_samples
        object.__setattr__(self, "first_number", np.cumsum(counts) - counts)

    def numbers(self, places: Places) -> NDArray[np.int64]:
        """int64 [n]; the number of each sample in the data set."""
        numbers: NDArray[np.int64] = self.first_number[places.shard] + places.sample
        return numbers

    def named(self, numbers: NDArray[np.int64]) -> tuple[tuple[str, int], ...]:
        """The first of these samples, as (URI, index)."""
        listed = numbers[:_LISTED_SAMPLES]
        shards = np.searchsorted(self.first_number, listed, side="right") - 1
        return tuple(
            (self.manifest.uri(int(shard)), int(number - self.first_number[shard]))
            for shard, number in zip(shards, listed, strict=True)
        )

    def part(self, step: KeptStep, rank: int) -> Places:
        """What ``rank`` should have got of a step."""
        return self.order.batch(
            epoch=step.at.epoch,
            row=step.at.row,
            global_batch=step.global_batch,
            rank=rank,
            world_size=step.world_size,
        )

    def absent_ranks(self, step: KeptStep) -> list[int]:
        """Ranks that recorded nothing of a step of which they had a part."""
        absent = set(range(step.world_size)) - {part.rank for part in step.parts}
        try:
            return sorted(rank for rank in absent if len(self.part(step, rank)))
        except (IndexError, ConfigError):
            return sorted(absent)  # no step of this order; ``epoch_audit`` says so


def epoch_audit(
    steps: Sequence[KeptStep],
    subject: Subject,
    *,
    epoch: int,
    start_row: int,
    due_row: int | None,
    is_last: bool,
    next_global_batch: int,
) -> tuple[EpochAudit, list[Finding]]:
    """Check one epoch.

    Args:
        steps: Its steps by row, without those in flight when the records end; none if nothing is recorded.
        subject: What was read.
        epoch: Which.
        start_row: Where the records start: 0 but in the first epoch.
        due_row: A row that a later iteration began at in this epoch, so that all before it must be there.
        is_last: Whether the epoch may be incomplete.
        next_global_batch: The global batch that comes behind these steps: too few rows for it end the epoch.
    """
    order = subject.order
    findings = list(_tiling(steps, epoch=epoch, start_row=start_row))
    counts = np.zeros(order.num_samples, dtype=np.uint16)
    num_padding = 0
    for step in steps:
        absent = subject.absent_ranks(step)
        if absent:
            text = (
                f"rank {', '.join(map(str, absent))} of {step.world_size} got nothing of the step at row {step.at.row}"
            )
            findings.append(Finding(kind="rank", text=f"{text} of epoch {epoch}", epoch=epoch))
        try:
            for part in step.parts:
                places = subject.part(step, part.rank)
                findings += _part_findings(part, subject.numbers(places), len(places))
                np.add.at(counts, subject.numbers(places)[~places.padded], 1)
                num_padding += int(places.padded.sum())
        except (IndexError, ConfigError) as error:
            findings.append(Finding(kind="order", text=f"a recorded step is none of this order: {error}", epoch=epoch))
    stop_row = max((step.at.row + step.rows for step in steps), default=start_row)
    batch = steps[-1].global_batch if steps else next_global_batch
    rows_left = min(
        order.steps_remaining(row=stop_row, global_batch=size) * order.rows_per_step(size)
        for size in (batch, next_global_batch)
    )
    if rows_left and not is_last:
        text = (
            f"epoch {epoch} ends at row {stop_row}, and {min(rows_left, order.rows_per_epoch - stop_row)} more were due"
        )
        findings.append(Finding(kind="gap", text=text, epoch=epoch))
    must_reach = max(stop_row, due_row or 0) if is_last else stop_row + rows_left
    if must_reach > stop_row and is_last:
        text = f"an attempt went on at row {must_reach} of epoch {epoch}, and the records end at row {stop_row}"
        findings.append(Finding(kind="gap", text=text, epoch=epoch))
    due = _due(subject, epoch=epoch, start_row=start_row, stop_row=must_reach)
    missing = np.flatnonzero(due & (counts == 0))
    repeated = np.flatnonzero(counts > 1)
    for kind, what, numbers in (("gap", "never", missing), ("repeat", "more than once", repeated)):
        if len(numbers):
            text = f"{len(numbers):,} samples of epoch {epoch} were delivered {what}"
            findings.append(Finding(kind=kind, text=text, epoch=epoch, samples=subject.named(numbers)))
    parts = [part for step in steps for part in step.parts]
    is_complete = not rows_left
    return EpochAudit(
        epoch=epoch,
        is_complete=is_complete,
        num_steps=len(steps),
        stop_row=min(stop_row, order.rows_per_epoch),
        num_rows=order.rows_per_epoch,
        num_once=int((counts == 1).sum()),
        num_repeats=int(counts[repeated].sum()) - len(repeated),
        num_gaps=len(missing),
        num_padding=num_padding,
        num_dropped=order.num_samples - int(due.sum()) if is_complete and not start_row else 0,
        num_skipped=sum(part.num_skipped for part in parts),
        num_bad=sum(part.num_bad for part in parts),
    ), findings


def _tiling(steps: Sequence[KeptStep], *, epoch: int, start_row: int) -> Iterable[Finding]:
    if start_row:
        text = f"rows 0 to {start_row} of epoch {epoch} are not recorded: the records start there"
        yield Finding(kind="file", text=text, epoch=epoch)
    row = start_row
    for step in steps:
        first, attempts = step.at.row, ", ".join(sorted({part.attempt for part in step.parts}))
        if first > row:
            yield Finding(kind="gap", text=f"rows {row} to {first} of epoch {epoch} are in no step", epoch=epoch)
        elif first < row:
            text = f"rows {first} to {min(row, first + step.rows)} of epoch {epoch} came again, in attempt {attempts}"
            yield Finding(kind="repeat", text=text, epoch=epoch)
        ranks = [part.rank for part in step.parts]
        for rank in sorted({rank for rank in ranks if ranks.count(rank) > 1}):
            text = f"rank {rank} got the step at row {first} of epoch {epoch} more than once, in attempt {attempts}"
            yield Finding(kind="repeat", text=text, epoch=epoch)
        row = max(row, first + step.rows)


def _part_findings(part: Step, numbers: NDArray[np.int64], num_due: int) -> Iterable[Finding]:
    at = f"rank {part.rank} at row {part.row} of epoch {part.epoch} (attempt {part.attempt})"
    got = part.num_samples + part.num_skipped + part.num_bad
    if got != num_due:
        text = f"{at} got {got} samples, skipped and bad ones included, and {num_due} were due"
        yield Finding(kind="count", text=text, epoch=part.epoch)
    if part.keys is not None and sorted(part.keys) != sorted(numbers.tolist()):
        wrong = sorted(set(part.keys) - set(numbers.tolist()))
        text = f"{at} read {len(wrong)} samples that were not due, the first is number {wrong[:1]} of the data set"
        yield Finding(kind="key", text=text, epoch=part.epoch)


def _due(subject: Subject, *, epoch: int, start_row: int, stop_row: int) -> NDArray[np.bool_]:
    """The samples in rows ``[start_row, stop_row)``, found without looking at any step; bool [samples]."""
    order = subject.order
    due = np.zeros(order.num_samples, dtype=np.bool_)
    rows_at_once = max(1, _SAMPLES_AT_ONCE // order.lanes)
    stop_row = min(stop_row, order.rows_per_epoch)
    for row in range(start_row, stop_row, rows_at_once):
        global_batch = (min(row + rows_at_once, stop_row) - row) * order.lanes
        places = order.batch(epoch=epoch, row=row, global_batch=global_batch, rank=0, world_size=1)
        due[subject.numbers(places)[~places.padded]] = True
    return due
