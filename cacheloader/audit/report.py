"""What an audit answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PRINTED_SAMPLES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that should not be.

    Attributes:
        kind: ``"repeat"``, ``"gap"``, ``"rank"``, ``"count"``, ``"key"``, ``"order"`` or ``"file"``.
        text: What, where.
        epoch: The epoch it is about, -1 where it is about none.
        samples: The samples in question, as (the shard's URI, index in the shard); the first 1000.
    """

    kind: str
    text: str
    epoch: int = -1
    samples: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochAudit:
    """What was delivered of one epoch, all ranks together.

    Attributes:
        epoch: Which.
        is_complete: Whether it ended; otherwise it was under way when the records end.
        num_steps: Steps that every rank got and nothing rolled back.
        stop_row: Rows delivered from the epoch's start.
        num_rows: Rows of the epoch.
        num_once: Samples delivered exactly once.
        num_repeats: Deliveries beyond the first of a sample, without padding.
        num_gaps: Samples that were due and not delivered.
        num_padding: Samples that filled the last step, marked as such.
        num_dropped: Samples of a last step that was not full and was left out.
        num_skipped: Of the delivered, those that the transform left out on purpose.
        num_bad: Of the delivered, those on which the transform failed.
    """

    epoch: int
    is_complete: bool
    num_steps: int
    stop_row: int
    num_rows: int
    num_once: int
    num_repeats: int
    num_gaps: int
    num_padding: int
    num_dropped: int
    num_skipped: int
    num_bad: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The answer.

    Attributes:
        world_sizes: Of each launch of the job, in order.
        num_rolled_back: Records of steps that a later resume went back behind.
        num_in_flight: Steps at the very end that only some ranks got before the job ended.
        has_keys: Whether every step names its samples, so that they were compared, too.
        epochs: One entry an epoch.
        findings: Empty if all is well.
    """

    world_sizes: list[int]
    num_rolled_back: int
    num_in_flight: int
    has_keys: bool
    epochs: list[EpochAudit] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def num_repeats(self) -> int:
        """Over all epochs."""
        return sum(epoch.num_repeats for epoch in self.epochs)

    @property
    def num_gaps(self) -> int:
        """Over all epochs."""
        return sum(epoch.num_gaps for epoch in self.epochs)


def lines(audit: Audit) -> Iterator[str]:
    """The answer for people."""
    worlds = audit.world_sizes
    yield (
        f"{len(worlds)} attempt{'s' * (len(worlds) != 1)} of {', '.join(map(str, _runs(worlds)))} ranks; "
        f"{audit.num_rolled_back:,} records rolled back by a resume, {audit.num_in_flight} steps in flight at the end"
    )
    for epoch in audit.epochs:
        rest = [
            f"{count:,} {what}"
            for count, what in (
                (epoch.num_padding, "padding"),
                (epoch.num_dropped, "dropped at the tail"),
                (epoch.num_skipped, "skipped by the transform"),
                (epoch.num_bad, "bad"),
            )
            if count
        ]
        extent = "complete" if epoch.is_complete else f"to row {epoch.stop_row:,} of {epoch.num_rows:,}"
        yield (
            f"epoch {epoch.epoch}: {extent}, {epoch.num_steps:,} steps, {epoch.num_once:,} samples once, "
            f"{epoch.num_repeats:,} repeats, {epoch.num_gaps:,} gaps" + "".join(f", {text}" for text in rest)
        )
    for finding in audit.findings:
        yield f"{finding.kind}: {finding.text}"
        for uri, index in finding.samples[:_PRINTED_SAMPLES]:
            yield f"    sample {index} of {uri}"
        if len(finding.samples) > _PRINTED_SAMPLES:
            yield "    … (--json lists up to 1000)"
    checked = "each sample read was recorded and is the one due" if audit.has_keys else "samples by their place"
    yield f"{audit.num_repeats:,} repeats, {audit.num_gaps:,} gaps ({checked}); {len(audit.findings)} findings"


def _runs(values: list[int]) -> list[str]:
    """Equal neighbours as one: ``[4, 4, 2]`` as ``["2 × 4", "2"]``."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return [str(value) if count == 1 else f"{count} × {value}" for value, count in runs]
