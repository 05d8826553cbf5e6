"""Samples of a WebDataset shard, by its index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cacheloader.errors import DatasetError
from cacheloader.formats.base import Located, assembled
from cacheloader.formats.coalesce import coalesce
from cacheloader.formats.tarindex import TarIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cacheloader.formats.base import ByteSource, Sample


class WebDatasetReader:
    """The samples of one shard; fields are ``bytes``, in the order of their members."""

    def __init__(self, data: ByteSource, index: bytes, *, uri: str, columns: Sequence[str] | None) -> None:
        self._data = data
        self._uri = uri
        self._index = TarIndex.from_block(index, shard_bytes=data.size_bytes, uri=uri)
        self._columns = None if columns is None else frozenset(columns) - {"__key__"}
        self._names: dict[int, tuple[str, ...]] = {}
        self._choose_slots()

    @property
    def num_samples(self) -> int:
        """How many samples the shard holds."""
        return self._index.num_samples

    def read(self, samples: NDArray[np.int64]) -> list[Sample]:
        """The samples at these positions, in this order.

        Args:
            samples: int64 [n], each in ``[0, num_samples)``; repeats are allowed.

        Raises:
            DatasetError: A sample lacks one of the columns.
            OSError: The shard cannot be read.
        """
        located = self.locate(samples)
        reads = coalesce(located.start, located.start + located.size)
        read = self._data.read
        blocks = [read(start, stop) for start, stop in zip(reads.start.tolist(), reads.stop.tolist(), strict=True)]
        ends = (reads.offset + located.size).tolist()
        # A slice of all of a bytes object is that object: what was read alone is not copied.
        values = [
            blocks[block][start:end]
            for block, start, end in zip(reads.read.tolist(), reads.offset.tolist(), ends, strict=True)
        ]
        return assembled(located.keys, located.names, values)

    def locate(self, samples: NDArray[np.int64]) -> Located:
        """Where the samples at these positions lie.

        Args:
            samples: int64 [n], each in ``[0, num_samples)``; repeats are allowed.

        Raises:
            DatasetError: A sample lacks one of the columns.
        """
        index = self._index
        samples = np.asarray(samples, dtype=np.int64)
        if not len(samples):
            nothing = np.empty(0, dtype=np.int64)
            return Located(keys=[], names=[], num_values=nothing, start=nothing, size=nothing)
        if samples.min() < 0 or samples.max() >= index.num_samples:
            raise IndexError(f"samples {samples.min()} to {samples.max()} of shard {self._uri} of {index.num_samples}")
        layouts = index.layout[samples]
        counts = self._chosen_count[layouts]
        if self._columns is not None and np.any(counts != len(self._columns)):
            self._lacks_column(samples, layouts, counts)

        # Member numbers of all samples in a row: the sample's first member plus each chosen slot of its layout.
        stops = np.cumsum(counts)
        slots = np.repeat(self._chosen_first[layouts] - (stops - counts), counts) + np.arange(stops[-1])
        members = np.repeat(index.first_member[samples].astype(np.int64), counts) + self._chosen[slots]
        names = self._names
        return Located(
            keys=index.keys(samples),
            names=[names.get(layout) or self._name_layout(layout) for layout in layouts.tolist()],
            num_values=counts,
            start=index.member_start[members].astype(np.int64),
            size=index.member_size[members].astype(np.int64),
        )

    def _choose_slots(self) -> None:
        """For each layout, the members that the columns ask for, by their place in the sample."""
        index = self._index
        first = index.first_slot.astype(np.int64)
        place = np.arange(len(index.slot_field)) - np.repeat(first[:-1], np.diff(first))
        if self._columns is None:
            self._chosen, self._chosen_first, self._chosen_count = place, first[:-1], np.diff(first)
            return
        wanted = np.array([index.field(number) in self._columns for number in range(index.num_fields)], dtype=bool)
        chosen = wanted[index.slot_field]
        before = np.concatenate(([0], np.cumsum(chosen)))[first]
        self._chosen, self._chosen_first, self._chosen_count = place[chosen], before[:-1], np.diff(before)

    def _name_layout(self, layout: int) -> tuple[str, ...]:
        names = self._index.fields_of(layout)
        if self._columns is not None:
            names = tuple(name for name in names if name in self._columns)
        self._names[layout] = names
        return names

    def _lacks_column(
        self, samples: NDArray[np.int64], layouts: NDArray[np.unsignedinteger], counts: NDArray[np.int64]
    ) -> None:
        assert self._columns is not None
        bad = int(np.flatnonzero(counts != len(self._columns))[0])
        fields = self._index.fields_of(int(layouts[bad]))
        raise DatasetError(
            f"sample {self._index.keys(samples[bad : bad + 1])[0]!r} of shard {self._uri} has the fields "
            f"{', '.join(fields)} and not {', '.join(sorted(self._columns.difference(fields)))}; "
            "leave that out of columns, or pack the shard again",
            uri=self._uri,
        )
