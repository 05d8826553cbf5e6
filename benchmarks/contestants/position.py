"""What a position costs: to save it, to go on from it, and to make chance depend on it. No byte of a shard is read."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from cacheloader.config import TransportOptions
from cacheloader.transport.reporting import FetchReporter

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from benchmarks.harness.contestant import Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter

SEED = 17
PAYLOAD = b"x"
PAGE_CACHE = "no files"
PASSES = 20


def key(shard: int, sample: int) -> str:
    """Key of a made-up sample."""
    return f"{shard}-{sample}"


class MadeUpBatches:
    """In place of ``cacheloader.source.Batches``.

    Args:
        shard: int32 [n]; shard of each sample, batch by batch.
        sample: int64 [n]; its index there.
        edges: int64 [batches + 1]; where each batch starts.
    """

    def __init__(self, shard: NDArray[np.int32], sample: NDArray[np.int64], edges: NDArray[np.int64]) -> None:
        self._at = list(zip(shard.tolist(), sample.tolist(), strict=True))
        self._edges = edges.tolist()
        self.size_bytes = [0] * (len(edges) - 1)

    def read(self, batch: int) -> list[dict[str, Any]]:
        """The samples of one batch."""
        places = self._at[self._edges[batch] : self._edges[batch + 1]]
        return [{"__key__": key(*at), "payload": PAYLOAD} for at in places]


class MadeUpSource:
    """In place of ``cacheloader.source.Source``: shards of equal size whose samples are made up when read.

    Args:
        manifest: The shards.
    """

    is_ranges = False

    def __init__(self, manifest: Any) -> None:
        self.manifest = manifest
        self.digest = manifest.digest

    def follow(self, plan: Any) -> None:
        """Take note of nothing; that the plan was computed is what costs. Nothing is held either."""

    def num_at_hand(self, held: None, shard: NDArray[np.int32], edges: NDArray[np.int64]) -> int:  # noqa: ARG002
        """All batches, since none has to be waited for."""
        return len(edges) - 1

    def locate(
        self,
        held: None,  # noqa: ARG002
        shard: NDArray[np.int32],
        sample: NDArray[np.int64],
        edges: NDArray[np.int64],
        *,
        until: int,  # noqa: ARG002
    ) -> MadeUpBatches:
        """Batches of samples that hold their key."""
        return MadeUpBatches(shard, sample, edges)

    def advance(self, held: None, clock: int) -> None:
        """Nothing is held."""

    def let_go(self, held: None) -> None:
        """Nothing is held."""

    def fetch_reporter(self) -> FetchReporter:
        """One that reports to nobody: there is no daemon."""
        return FetchReporter(TransportOptions(daemon="none"))


class _Contestant:
    """What all of them share.

    Args:
        shards: Of the data set.
        samples_per_shard: Likewise.
        row: Where the position is, in an epoch of one lane.
    """

    def __init__(self, *, shards: int = 4, samples_per_shard: int = 10_000, row: int = 0) -> None:
        self._shards = shards
        self._samples_per_shard = samples_per_shard
        self._row = row

    def prepare(self, task: Task) -> None:
        """Import, write the manifest, and deliver once something small, so that nothing is lazy any more."""
        import cacheloader as cl
        from cacheloader.manifest.record import Manifest, ShardInfo

        def manifest(shards: int) -> Manifest:
            infos = [
                ShardInfo(uri=f"mem://{i}", size_bytes=1, version="1", num_samples=self._samples_per_shard)
                for i in range(shards)
            ]
            return Manifest.build(infos, format="webdataset", origin_id="made up")

        self._cl = cl
        self._batch_size = task.batch_size
        self._manifest = manifest(4)
        next(iter(self.open()))
        self._manifest = manifest(self._shards)

    def open(self, **options: Any) -> Any:
        """A loader that stands at the position."""
        source = MadeUpSource(self._manifest)
        with mock.patch("cacheloader.dataset.Source", return_value=source):
            dataset = self._cl.RemoteDataset("mem://", seed=SEED, **options)
        loader = self._cl.DataLoader(dataset, batch_size=self._batch_size, collate_fn=list)
        if self._row and self._manifest.total_samples > self._row:
            loader.load_state_dict(loader.state_dict() | {"row": self._row})
        return loader

    def measurement(self, meter: Meter) -> Measurement:
        """Compare the batch at the position with the order's own arithmetic."""
        batch = next(iter(self.open()))
        meter.verify((sample["__key__"], sample["payload"]) for sample in batch)
        samples = self._shards * self._samples_per_shard
        return meter.measurement({"samples of the data set": samples, "row": self._row})


class FirstBatch(_Contestant):
    """From the constructor of the data set to the first batch at a position, several times."""

    def run(self, task: Task, meter: Meter) -> Measurement:  # noqa: ARG002
        """One phase; an epoch of it is one first batch."""
        with meter.phase("first batch", page_cache=PAGE_CACHE) as clock:
            for _ in range(PASSES):
                batch = next(iter(self.open()))
                clock.add(samples=len(batch), size_bytes=sum(len(sample["payload"]) for sample in batch))
                clock.end_epoch()
        return self.measurement(meter)


class States(_Contestant):
    """``state_dict()`` of a loader that has delivered a batch: as often in an epoch as a batch has samples."""

    def run(self, task: Task, meter: Meter) -> Measurement:
        """One phase of many states."""
        loader = self.open()
        next(iter(loader))
        loader.state_dict()
        with meter.phase("states", page_cache=PAGE_CACHE) as clock:
            for _ in range(PASSES):
                for _ in range(task.batch_size):
                    state = loader.state_dict()
                clock.add(samples=task.batch_size, size_bytes=task.batch_size)
                clock.end_epoch()
        if state["row"] != self._row + task.batch_size:
            raise RuntimeError(f"the state is at row {state['row']}")
        return self.measurement(meter)


class Draws(_Contestant):
    """Batches whose transform does nothing, or draws.

    Args:
        transform: ``"none"``, ``"identity"``, ``"identity with rng"``, or ``"draws"``.
    """

    def __init__(self, *, transform: str, **options: Any) -> None:
        super().__init__(**options)
        self._name = transform

    def run(self, task: Task, meter: Meter) -> Measurement:  # noqa: ARG002
        """One phase; an epoch of it is a batch."""
        batches = iter(self.open(transform=_TRANSFORMS[self._name]))
        next(batches)
        with meter.phase("transformed", page_cache=PAGE_CACHE) as clock:
            for _ in range(PASSES):
                batch = next(batches)
                clock.add(samples=len(batch), size_bytes=sum(len(sample["payload"]) for sample in batch))
                clock.end_epoch()
        return self.measurement(meter)


def _identity(sample: Any) -> Any:
    return sample


def _identity_with_rng(sample: Any, rng: np.random.Generator) -> Any:  # noqa: ARG001
    return sample


def _drawing(sample: Any) -> Any:
    import torch

    random.random()
    np.random.random()
    torch.rand(())
    return sample


_TRANSFORMS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "identity": _identity,
    "identity with rng": _identity_with_rng,
    "draws": _drawing,
}
