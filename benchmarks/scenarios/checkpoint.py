"""Saving in the background against saving in the foreground, and a verified commit against torch's own saves."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from benchmarks.contestants.saving import weights
from benchmarks.harness.contestant import Task
from benchmarks.harness.measurement import Tally
from benchmarks.harness.meter import sample_checksum
from benchmarks.harness.report import Comparison
from benchmarks.harness.runner import Entry
from benchmarks.scenarios.scenario import Prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SYNC = "cacheloader, sync"
THREAD = "cacheloader, thread"
PROCESS = "cacheloader, process"
DCP = "torch dcp.save"
DCP_ASYNC = "torch dcp.async_save"
HOW = {SYNC: "sync", THREAD: "thread", PROCESS: "process", DCP: "dcp.save", DCP_ASYNC: "dcp.async_save"}
LABELS = tuple(HOW)

STALL = "fetch p50 ms"
COMPARISONS = (
    Comparison(
        name="stall, thread / sync", over=(THREAD, "saves"), under=(SYNC, "saves"), figure=STALL, target=0.2,
        at_most=True,
    ),
    Comparison(
        name="stall, process / sync", over=(PROCESS, "saves"), under=(SYNC, "saves"), figure=STALL, target=0.2,
        at_most=True,
    ),
    Comparison(name="stall, torch async / torch sync", over=(DCP_ASYNC, "saves"), under=(DCP, "saves"), figure=STALL),
    Comparison(name="stall, thread / torch async", over=(THREAD, "saves"), under=(DCP_ASYNC, "saves"), figure=STALL),
    Comparison(
        name="stall of the first save, thread / sync", over=(THREAD, "first save"), under=(SYNC, "first save"),
        figure=STALL,
    ),
    Comparison(name="complete saves per second, sync / torch sync", over=(SYNC, "saves"), under=(DCP, "saves")),
    Comparison(name="complete saves per second, thread / sync", over=(THREAD, "saves"), under=(SYNC, "saves")),
)  # fmt: skip

NOTES = (
    "A fetch is a call of save(): the time that the training thread stands still. Behind it, each save is waited for, "
    "so that none meets another; samples/s counts complete saves. One rank; nothing else runs meanwhile.",
    "complete means for cacheloader: every file synced, seen in its size, and the commit record written and read back; "
    "for torch: dcp.save has returned, or the future of dcp.async_save is done.",
    "The first save makes the memory for the copy (and the process, in mode process); later ones reuse it. torch's own "
    "async_save makes new memory each time.",
    "Each run ends with a restore into another model, whose parameters are compared to the last bit.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The scenario.

    Attributes:
        num_parameters: Floats in the model; with Adam's state three times as many are saved.
        passes: Saves of each run, the first aside.
    """

    theme: ClassVar[str] = "checkpoint"
    labels: ClassVar[Sequence[str]] = LABELS

    num_parameters: int = 6_000_000
    passes: int = 4

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:  # noqa: ARG002  (each run has its own)
        """Compute what a restore has to bring back."""
        size = replace(self, num_parameters=10_000, passes=1) if small else self
        payload = weights(size.num_parameters).tobytes()
        expected = Tally(samples=1, size_bytes=len(payload), checksum=sample_checksum("weight", payload) % 2**64)
        task = Task(
            folder="", source_folder="", reads="", shard_names=[], shard_bytes=[], store=None, expected=expected,
            batch_size=1, num_workers=0, warm_epochs=0,
        )  # fmt: skip
        yield Prepared(
            entries=[
                Entry(
                    label=label,
                    factory="benchmarks.contestants.saving:Saving",
                    options={"how": how, "num_parameters": size.num_parameters, "passes": size.passes},
                    task=task,
                )
                for label, how in HOW.items()
            ],
            comparisons=COMPARISONS,
            parameters={
                "num_parameters": size.num_parameters,
                "state_bytes": size.num_parameters * 12,
                "passes": size.passes,
            },
            notes=NOTES,
        )


SCENARIO = Checkpoint()
