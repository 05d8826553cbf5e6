"""The daemon shares cores with a training job: what does it take from them while it has nothing to do?"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from benchmarks.harness.packing import pack
from benchmarks.harness.report import Comparison
from benchmarks.harness.runner import Entry
from benchmarks.scenarios.ground import ground

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.scenarios.scenario import Prepared

CONNECTED = "daemon, one client connected"
ALONE = "daemon, no client"
LABELS = (CONNECTED, ALONE)

COMPARISONS = tuple(
    Comparison(name=label, over=(label, "rest"), under=None, figure=figure)
    for label in LABELS
    for figure in ("wake-ups/s", "daemon CPU s/min")
)

NOTES = (
    "Wake-ups: voluntary context switches of all threads of the daemon and its index process, each of which is a "
    "wake-up. CPU time comes in ticks of 10 ms.",
    "Every shard is cached, read and on the disk before; then nothing is asked of the daemon. No sample is delivered "
    "meanwhile, so rates and costs by the gigabyte mean nothing here.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """The scenario.

    Attributes:
        idle_s: How long each is watched.
    """

    theme: ClassVar[str] = "idle"
    labels: ClassVar[Sequence[str]] = LABELS

    idle_s: float = 60.0

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:
        """Pack something, start the store, upload."""
        size = replace(self, idle_s=1.0) if small else self
        packed = pack(folder / "packed", samples=512, sample_bytes=10_000, shards=8)
        with ground(folder, packed, warm_epochs=0) as there:
            entries = [
                Entry(
                    label=label,
                    factory="benchmarks.contestants.resting:Resting",
                    options={"idle_s": size.idle_s, "is_connected": is_connected},
                    task=there.task(0),
                )
                for label, is_connected in ((CONNECTED, True), (ALONE, False))
            ]
            yield there.prepared(entries, comparisons=COMPARISONS, rivals=(), notes=NOTES, sizes=asdict(size))


SCENARIO = Idle()
