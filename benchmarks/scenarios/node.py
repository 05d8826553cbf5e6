"""What happens on a node besides reading: two jobs on the same data, a daemon that dies, a job that goes on."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.harness.packing import pack
from benchmarks.harness.report import Comparison
from benchmarks.harness.runner import Entry
from benchmarks.scenarios import rivals
from benchmarks.scenarios.ground import ground

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.scenarios.scenario import Prepared

JOBS = 2
BOTH = f"cacheloader, {JOBS} jobs"
RIVAL = rivals.WEBDATASET
RIVAL_BOTH = f"{RIVAL.label}, {JOBS} jobs that share it"
UNDISTURBED = "cacheloader, daemon left alone"
KILLED = "cacheloader, daemon killed"
RESUMED = "cacheloader, resumed"
LABELS = (BOTH, RIVAL_BOTH, UNDISTURBED, KILLED, RESUMED)

BYTES = "origin bytes / data set"
COMPARISONS = (
    Comparison(
        name="bytes for each of two jobs", over=(BOTH, "cold"), under=None, figure=BYTES, target=0.505, at_most=True
    ),
    Comparison(name=f"bytes for each of two jobs, {RIVAL.label}", over=(RIVAL_BOTH, "cold"), under=None, figure=BYTES),
    Comparison(name=f"two jobs / {RIVAL.label}", over=(BOTH, "cold"), under=(RIVAL_BOTH, "cold")),
    *(
        Comparison(
            name=f"{phase} epoch, daemon killed / left alone",
            over=(KILLED, phase),
            under=(UNDISTURBED, phase),
            figure="wall s",
        )
        for phase in ("cold", "warm")
    ),
    *(
        Comparison(name=f"longest wait, {phase}, {label}", over=(label, phase), under=None, figure="longest wait s")
        for label in (UNDISTURBED, KILLED)
        for phase in ("cold", "warm")
    ),
    Comparison(name="first batch after a resume, s", over=(RESUMED, "resumed"), under=None, figure="first batch s"),
    Comparison(
        name="first batch after a resume / of a new job",
        over=(RESUMED, "resumed"),
        under=(RESUMED, "cold"),
        figure="first batch s",
    ),
    Comparison(name="bytes from the store after a resume", over=(RESUMED, "resumed"), under=None, figure=BYTES),
)

NOTES = (
    "Two jobs: two processes, started together, that know nothing of each other; each reads the whole data set in an "
    "order of its own, twice. Bytes from the store are divided by the length of the data set there and by the number "
    "of jobs: 0.5 is one fetch for both. The peer's jobs share one cache folder.",
    "Daemon killed: SIGKILL of the private daemon in the middle of the cold and of the warm epoch; each step sleeps. "
    "Nobody restarts it but the loader itself.",
    "Resumed: an epoch that fills the cache, half of the next, then everything ends, the daemon too; a new data set "
    "and loader in the same process load the position and read the rest. Both halves together are compared with what "
    "was packed: no sample twice, none missing. The first batch includes the start of the daemon.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The scenario.

    Attributes:
        samples: Size of the data set.
        sample_bytes: Payload of one sample.
        shards: Number of tar files.
        step_s: Time of a step while daemons die.
    """

    theme: ClassVar[str] = "node"
    labels: ClassVar[Sequence[str]] = LABELS

    samples: int = 2560
    sample_bytes: int = 100_000
    shards: int = 16
    step_s: float = 0.03

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:
        """Pack, start the store, upload."""
        size = replace(self, samples=512, sample_bytes=10_000, shards=4) if small else self
        packed = pack(folder / "packed", samples=size.samples, sample_bytes=size.sample_bytes, shards=size.shards)
        with ground(folder, packed, warm_epochs=1) as there:
            task = there.task(0)

            def own(label: str, factory: str, **options: Any) -> Entry:
                return Entry(label=label, factory=f"benchmarks.contestants.{factory}", options=options, task=task)

            product = "benchmarks.contestants.cacheloader:CacheloaderLoader"
            entries = [own(BOTH, "ranks:Jobs", loader=product, ranks=JOBS, is_seeded=True)]
            for entry in there.rival_entries(RIVAL, (0,), script="ranks:Jobs"):
                entries += [replace(entry, label=RIVAL_BOTH, options={**entry.options, "ranks": JOBS})]
            entries += [
                own(UNDISTURBED, "interrupted:Killed", step_s=size.step_s),
                own(KILLED, "interrupted:Killed", step_s=size.step_s, after_steps=packed.expected.samples // 256),
                own(RESUMED, "interrupted:Resumed"),
            ]
            yield there.prepared(entries, comparisons=COMPARISONS, rivals=(RIVAL,), notes=NOTES, sizes=asdict(size))


SCENARIO = Node()
