"""What one run of one contestant showed, in plain types that go through JSON unchanged."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

NOISY_CORES = 0.5
"""A run is noisy if others used more than this on average."""

OPENED = "data_set_open_s"
"""The mark of the moment when a loader's data set is open: servers started, shards and counts known."""

FIRST_FETCH = "first_fetch_s"
"""The mark of how long the first ``next()`` of the phase took."""

LONGEST_FETCH = "longest_fetch_s"
"""The mark of how long the longest ``next()`` of the phase took."""

WAKE_UPS = "wake_ups"
"""The mark that counts how often a thread of the daemon was woken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How much was delivered, and which.

    Attributes:
        samples: Number of samples.
        size_bytes: Bytes of their payload, keys not counted.
        checksum: Sum over all samples of a checksum of key and payload, modulo 2**64: the same for every order, another
            one if a sample is missing, repeated, damaged or under a wrong key. 0 where only counts were taken.
    """

    samples: int
    size_bytes: int
    checksum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSeconds:
    """CPU time by who used it, user and system, in seconds.

    Attributes:
        client: The process that iterates, its workers, and what they started.
        daemon: Processes of a session of their own that the client started.
        server: The object store.
        other: Everything else on the machine, kernel threads included.
        interrupts: Time in interrupts, which the kernel charges to nobody.
        steal: Time that the hypervisor gave to somebody else.
    """

    client: float
    daemon: float
    server: float
    other: float
    interrupts: float
    steal: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Peak resident size of single processes, in bytes; pages that processes share are counted in each of them.

    Attributes:
        main: The process that iterates.
        worker: The largest of its workers, 0 without workers.
        daemon: All daemon processes together.
    """

    main: int
    worker: int
    daemon: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One timed part of a run.

    Attributes:
        name: ``"cold"``, ``"warm"``, ``"disk"``.
        samples: Delivered in all epochs of the phase.
        size_bytes: Their payload.
        wall_s: From before the first action to the last sample.
        epoch_s: Wall time of each epoch; the first one includes opening.
        first_batch_s: From the start of the phase to the first batch, if it came in batches.
        fetch_p50_s: Median time inside ``next()``.
        fetch_p99_s: 99th percentile of it.
        fetch_total_s: Time inside ``next()`` in all epochs, each epoch's start and end included.
        marks: Other moments, in seconds from the start of the phase.
        cpu_s: Who computed.
        peak_memory_bytes: Who held what.
        origin_bytes: Bytes of object bodies that the store sent meanwhile, by its own count; ``None`` if not counted.
        page_cache: Which files the kernel held in memory when the phase began.
        stored_bytes: What the data set takes in the store, in the format that the contestant reads; 0 if unknown.
    """

    name: str
    samples: int
    size_bytes: int
    wall_s: float
    epoch_s: list[float]
    first_batch_s: float | None
    fetch_p50_s: float | None
    fetch_p99_s: float | None
    fetch_total_s: float | None
    marks: dict[str, float]
    cpu_s: CpuSeconds
    peak_memory_bytes: PeakMemory
    origin_bytes: int | None
    page_cache: str
    stored_bytes: int = 0

    @property
    def samples_per_s(self) -> float:
        """Samples delivered per second of wall time."""
        return self.samples / self.wall_s

    @property
    def bytes_per_s(self) -> float:
        """Payload bytes delivered per second of wall time."""
        return self.size_bytes / self.wall_s

    @property
    def steady_samples_per_s(self) -> float | None:
        """Rate of one cold epoch after its first batch, ``None`` where the phase has no first batch."""
        if self.first_batch_s is None or len(self.epoch_s) != 1 or self.wall_s <= self.first_batch_s:
            return None
        first = self.marks.get("first_batch_samples", 0)
        return (self.samples - first) / (self.wall_s - self.first_batch_s)

    @property
    def opened_samples_per_s(self) -> float | None:
        """Rate of one epoch from the moment that the data set was open, ``None`` where nobody marked that."""
        opened_s = self.marks.get(OPENED)
        return None if opened_s is None else self.samples / (self.wall_s - opened_s)

    @property
    def opened_first_batch_s(self) -> float | None:
        """Time from the open data set, or from the start where nobody marked that, to the first batch."""
        return None if self.first_batch_s is None else self.first_batch_s - self.marks.get(OPENED, 0.0)

    @property
    def waiting_share(self) -> float | None:
        """Part of the wall time that the iterating thread spent inside ``next()``."""
        return None if self.fetch_total_s is None else self.fetch_total_s / self.wall_s

    @property
    def later_waiting_share(self) -> float | None:
        """The same from the first batch on."""
        first_s = self.marks.get(FIRST_FETCH)
        if self.fetch_total_s is None or self.first_batch_s is None or first_s is None:
            return None
        return (self.fetch_total_s - first_s) / (self.wall_s - self.first_batch_s)

    @property
    def origin_bytes_per_payload_byte(self) -> float | None:
        """How much the store sent for each byte that was delivered."""
        return None if self.origin_bytes is None or not self.size_bytes else self.origin_bytes / self.size_bytes

    @property
    def origin_bytes_per_stored_byte(self) -> float | None:
        """How often the store has sent the data set in each epoch, ``None`` where its size or that is not known."""
        if self.origin_bytes is None or not self.stored_bytes or not self.epoch_s:
            return None
        return self.origin_bytes / self.stored_bytes / len(self.epoch_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of one contestant.

    Attributes:
        phases: In the order in which they ran.
        verified: What an untimed pass delivered, compared with what was packed.
        configuration: How the contestant was set up, for the report.
        busy_cores_before: Cores in use by anything, just before the run.
        noisy_before: Runs of the same contestant in the same round that were thrown away, since others used too much.
    """

    phases: list[Phase]
    verified: Tally
    configuration: dict[str, Any] = field(default_factory=dict)
    busy_cores_before: float = 0.0
    noisy_before: int = 0

    @property
    def other_cores(self) -> float:
        """Cores that others used in the noisiest phase."""
        return max((phase.cpu_s.other / phase.wall_s for phase in self.phases), default=0.0)

    def phase(self, name: str) -> Phase | None:
        """The phase of that name, if the run had one."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The inverse of ``to_dict``."""
        phases = [
            Phase(
                **{
                    **phase,
                    "cpu_s": CpuSeconds(**phase["cpu_s"]),
                    "peak_memory_bytes": PeakMemory(**phase["peak_memory_bytes"]),
                }
            )
            for phase in fields["phases"]
        ]
        return cls(**{**fields, "phases": phases, "verified": Tally(**fields["verified"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a run ended that measured nothing.

    Attributes:
        kind: Type of the exception, or how the process ended.
        message: One line of what it said.
    """

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Every contestant's run in one round.

    Attributes:
        measured: By label, in the order of the runs.
        failed: By label.
    """

    measured: dict[str, Measurement]
    failed: dict[str, Failure] = field(default_factory=dict)


def phase_names(rounds: Sequence[Round]) -> list[str]:
    """Of all contestants, in the order in which they were first met."""
    return list(dict.fromkeys(phase.name for one in rounds for run in one.measured.values() for phase in run.phases))
