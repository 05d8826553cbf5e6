"""What a contestant is, and the task it is given."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from benchmarks.harness.measurement import Measurement, Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchmarks.harness.meter import Meter, PhaseClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Where the data set lies.

    Attributes:
        endpoint_url: The S3 server.
        bucket: Bucket.
        prefix: Keys begin with this; ends in ``/``.
        key: Access key.
        secret: Secret key.
        region: Region name.
        size_bytes: Of all objects below ``prefix``.
    """

    endpoint_url: str
    bucket: str
    prefix: str
    key: str
    secret: str
    region: str
    size_bytes: int = 0

    @property
    def storage_options(self) -> dict[str, Any]:
        """What fsspec's s3fs, and whoever follows its names, wants to be told."""
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": self.region},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a contestant shall deliver.

    Attributes:
        folder: Empty directory of this run alone, on the disk under test.
        source_folder: The packed shards on the same disk, for contestants that need no store.
        reads: JSON file with the order of the product's second epoch: a list of batches of (shard, start, stop).
        shard_names: File names of the shards.
        shard_bytes: Their lengths.
        store: The object store, ``None`` for contestants that need none.
        expected: What one epoch is.
        batch_size: Samples per batch.
        num_workers: Loader workers.
        warm_epochs: Epochs in the warm phase.
        has_disk_epoch: Whether one more comes from the disk, after the page cache was emptied.
        server_pid: The object store's process, 0 without one.
        metrics_url: Where the object store counts what it sends, "" if it does not.
    """

    folder: str
    source_folder: str
    reads: str
    shard_names: list[str]
    shard_bytes: list[int]
    store: Store | None
    expected: Tally
    batch_size: int
    num_workers: int
    warm_epochs: int
    server_pid: int = 0
    metrics_url: str = ""
    has_disk_epoch: bool = True

    def origin(self) -> Store:
        """The object store."""
        assert self.store is not None, "this contestant needs an object store"
        return self.store

    def to_dict(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The inverse of ``to_dict``."""
        store = None if fields["store"] is None else Store(**fields["store"])
        return cls(**{**fields, "store": store, "expected": Tally(**fields["expected"])})


class Contestant(Protocol):
    """One of those that are compared. Lives in a fresh process and runs once."""

    def prepare(self, task: Task) -> None:
        """Import, and do all else that no clock should see."""
        ...

    def run(self, task: Task, meter: Meter) -> Measurement:
        """Deliver the data set inside ``meter.phase(…)``, then once more under ``meter.verify``."""
        ...


class Loader(Protocol):
    """A data loader that a script such as ``epochs.Epochs`` drives. This is what a peer's module has to supply."""

    def prepare(self, task: Task) -> None:
        """Import the library, and do all else that no clock should see."""
        ...

    def open(self, task: Task, clock: PhaseClock) -> Iterable[Any]:
        """An iterable of batches; iterating it again is the next epoch. ``clock.mark`` takes note of moments."""
        ...

    def count(self, batch: Any) -> tuple[int, int]:
        """Samples and payload bytes of a batch; cheap, since it runs inside the clock."""
        ...

    def items(self, batch: Any) -> Iterator[tuple[str, bytes]]:
        """Key and payload of each sample."""
        ...

    def close(self) -> None:
        """End what ``open`` started."""
        ...

    @property
    def is_cached(self) -> bool:
        """Whether a second epoch reads local files below ``task.folder``."""
        ...

    @property
    def configuration(self) -> dict[str, Any]:
        """How the library was set up, for the report."""
        ...
