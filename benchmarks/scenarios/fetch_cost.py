"""What it costs to bring a gigabyte: the daemon beside its own engine, and the daemon at rest."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.harness.contestant import Task
from benchmarks.harness.packing import pack
from benchmarks.harness.report import Comparison
from benchmarks.harness.runner import Entry
from benchmarks.harness.store import running_store
from benchmarks.scenarios.scenario import Prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ENGINE = "engine, 8 requests in flight"
ENGINE_WIDE = "engine, 32 requests in flight"
ENGINE_REUSING = "engine, 8 requests in flight, memory reused"
DAEMON = "daemon"
LABELS = (ENGINE, ENGINE_REUSING, ENGINE_WIDE, DAEMON)

CPU_TARGET = 1.3
RATE_TARGET = 0.85
FIRST_TARGET = 1.5

COMPARISONS = (
    Comparison(
        name="daemon / engine, 8 in flight",
        figure="CPU s/GB",
        over=(DAEMON, "cold"),
        under=(ENGINE, "cold"),
        target=CPU_TARGET,
        at_most=True,
    ),
    Comparison(
        name="daemon / engine, 8 in flight, memory reused",
        figure="CPU s/GB",
        over=(DAEMON, "cold"),
        under=(ENGINE_REUSING, "cold"),
        target=CPU_TARGET,
        at_most=True,
    ),
    Comparison(
        name="daemon / engine, 32 in flight", figure="CPU s/GB", over=(DAEMON, "cold"), under=(ENGINE_WIDE, "cold")
    ),
    Comparison(name="daemon / engine, 8 in flight", over=(DAEMON, "cold"), under=(ENGINE, "cold"), target=RATE_TARGET),
    Comparison(name="daemon / engine, 32 in flight", over=(DAEMON, "cold"), under=(ENGINE_WIDE, "cold")),
    Comparison(
        name="first shard, daemon / engine that gets it alone",
        figure="first batch s",
        over=(DAEMON, "cold"),
        under=(ENGINE, "cold"),
        target=FIRST_TARGET,
        at_most=True,
    ),
)

NOTES = (
    "All shards of a data set, from an S3 server on the same machine to files on the same disk. The engine writes the "
    "bodies of ranged GETs to files and does nothing else. The daemon also checks the version of every range, sums all "
    "bytes, makes the index of samples, keeps its quota and publishes each shard; a client leases each shard in the "
    "order of its plan and reads none.",
    "CPU s/GB: user and system time of the client process, the daemon and its index process together, in the cold "
    "phase, by the gigabyte of payload. The start of the daemon, the opening of the data set and all imports lie "
    "before the clock, for the engine too.",
    "first batch s is the time to the first lease, and for the engine to the last byte of the first shard, which it "
    "gets before all others with all its requests.",
    "At rest: voluntary context switches of all threads of the daemon and its index process, each of which is a "
    "wake-up. The scenario idle looks for longer.",
    "The engine with 8 requests in flight, as many as the daemon begins with, and with 32, the most that it allows "
    "itself where more requests bring more bytes.",
    "Every run ends with an untimed pass whose keys and bytes are compared with what was packed.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCost:
    """The scenario.

    Attributes:
        samples: Size of the data set.
        sample_bytes: Payload of one sample.
        shards: Number of tar files.
        idle_s: How long the daemon is watched at rest, with a client and without.
    """

    theme: ClassVar[str] = "fetch-cost"
    labels: ClassVar[Sequence[str]] = LABELS

    samples: int = 10_240
    sample_bytes: int = 100_000
    shards: int = 16
    idle_s: float = 3.0

    @contextmanager
    def prepare(self, folder: Path, *, small: bool) -> Iterator[Prepared]:
        """Pack, start the store, upload."""
        size = FetchCost(samples=512, sample_bytes=10_000, shards=4, idle_s=1.0) if small else self
        packed = pack(folder / "packed", samples=size.samples, sample_bytes=size.sample_bytes, shards=size.shards)
        with running_store(folder / "store") as store:
            task = Task(
                folder="",
                source_folder=str(packed.folder),
                reads="",
                shard_names=packed.names,
                shard_bytes=packed.sizes_bytes,
                store=store.upload(packed, "counted/", with_counts=True),
                expected=packed.expected,
                batch_size=0,
                num_workers=0,
                warm_epochs=0,
                server_pid=store.server.pid,
                metrics_url=store.metrics_url,
            )

            def engine(label: str, concurrency: int, *, reuse_memory: bool = False) -> Entry:
                options = {"concurrency": concurrency, "first": 0, "reuse_memory": reuse_memory}
                return Entry(label=label, factory="benchmarks.contestants.engine:Engine", options=options, task=task)

            yield Prepared(
                entries=[
                    engine(ENGINE, 8),
                    engine(ENGINE_REUSING, 8, reuse_memory=True),
                    engine(ENGINE_WIDE, 32),
                    Entry(
                        label=DAEMON,
                        factory="benchmarks.contestants.warm_up:WarmUp",
                        options={"idle_s": size.idle_s},
                        task=task,
                    ),
                ],
                comparisons=COMPARISONS,
                parameters={
                    "samples": size.samples,
                    "sample_bytes": size.sample_bytes,
                    "shards": f"{size.shards} tars of {packed.sizes_bytes[0] / 1e6:.1f} MB by webdataset.ShardWriter",
                    "store": "SeaweedFS on the same machine, loopback",
                },
                notes=NOTES,
                before_each=store.warm,
            )


SCENARIO = FetchCost()
