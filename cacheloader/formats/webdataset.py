"""WebDataset: tar shards whose members form samples by name, grouped exactly as the ``webdataset`` package does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cacheloader.errors import CorruptShard, DatasetError
from cacheloader.formats.base import Located, assembled
from cacheloader.formats.coalesce import coalesce
from cacheloader.formats.tar import walk_members
from cacheloader.formats.tarindex import TarIndex, pack_index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cacheloader.formats.base import ByteSource, Sample

_RESERVED = frozenset(("__key__", "__url__"))
"""Fields that webdataset itself puts into a sample; it refuses members that would be called so, and so do we."""


class WebDatasetFormat:
    """Tar shards; a sample is a run of members with the same name up to the first dot of the file name."""

    name = "webdataset"
    suffixes = (".tar",)
    is_ranges = True

    def build_index(self, data: ByteSource, *, uri: str) -> bytes:
        """Where each sample lies (see ``ShardFormat.build_index``).

        A field that appears twice in one sample is an error, as in webdataset: which of the two is meant is anybody's
        guess.
        """
        return _Grouping(uri).index(data)

    def open(
        self, data: ByteSource, index: bytes, *, uri: str, columns: Sequence[str] | None = None
    ) -> WebDatasetReader:
        """A reader over ``data`` (see ``ShardFormat.open``)."""
        return WebDatasetReader(data, index, uri=uri, columns=columns)


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


class _Grouping:
    """Members of one archive on their way to samples."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._fields: dict[str, int] = {}
        self._layouts: dict[tuple[int, ...], int] = {}

    def index(self, data: ByteSource) -> bytes:
        numbers: dict[bytes, int] = {}
        keys: list[bytes] = []
        layouts: list[int] = []
        first_member = [0]
        member_start: list[int] = []
        member_size: list[int] = []
        current: bytes | None = None
        fields: list[int] = []
        for name, start, stop in walk_members(data, uri=self._uri):
            split = split_name(name)
            if split is None:
                continue
            key, suffix = split
            if key != current:
                if current is not None:
                    layouts.append(self._layout(fields))
                    first_member.append(len(member_start))
                keys.append(key)
                current, fields = key, []
            number = numbers.get(suffix)
            if number is None:
                number = numbers[suffix] = self._field(suffix, name, start)
            if number in fields:
                raise CorruptShard(
                    f"shard {self._uri} has a second field {suffix.decode(errors='replace')!r} in sample "
                    f"{key.decode(errors='replace')!r} at offset {start}; a field may appear once in a sample "
                    "(upper and lower case are one): pack the shard again",
                    uri=self._uri,
                )
            fields.append(number)
            member_start.append(start)
            member_size.append(stop - start)
        if current is not None:
            layouts.append(self._layout(fields))
            first_member.append(len(member_start))
        return pack_index(
            shard_bytes=data.size_bytes,
            keys=keys,
            layouts=layouts,
            first_member=first_member,
            member_start=member_start,
            member_size=member_size,
            slots=self._layouts,
            fields=list(self._fields),
        )

    def _layout(self, fields: list[int]) -> int:
        return self._layouts.setdefault(tuple(fields), len(self._layouts))

    def _field(self, suffix: bytes, name: bytes, start: int) -> int:
        field = suffix.decode("utf-8", "surrogateescape").lower()
        if field in _RESERVED:
            raise CorruptShard(
                f"shard {self._uri} has a member {name.decode(errors='replace')!r} at offset {start}, and the field "
                f"{field} is reserved; rename the member",
                uri=self._uri,
            )
        return self._fields.setdefault(field, len(self._fields))


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Key and suffix of a member, ``None`` if it belongs to no sample.

    The key is all up to the first dot of the file name, directories included; the suffix is the rest. Members
    without a dot, and those below a name such as ``__meta__``, belong to none.
    """
    if name.startswith(b"__"):
        top, slash, _ = name.partition(b"/")
        if not slash:
            top = top.removesuffix(b"\n")
        if len(top) >= 4 and top.endswith(b"__"):
            return None
    file_start = name.rfind(b"/") + 1
    dot = name.find(b".", file_start)
    if dot < 0 or not _is_key(name, file_start, dot):
        return None
    return name[:dot], name[dot + 1 :]


def _is_key(name: bytes, file_start: int, dot: int) -> bool:
    """Whether webdataset takes ``name[:dot]`` for a key; two of its rules are side effects that data sets rely on."""
    if b"\n" not in name[:dot]:
        if dot > file_start:
            return True
        # A hidden file counts as a field of its directory, if that has no dot in its own name.
        folder = name[: file_start - 1] if file_start else b"."
        return b"." not in folder[folder.rfind(b"/") + 1 :]
    # Directories with a line break in their name may have no dot behind it.
    for start in (0, *(at + 1 for at in range(dot) if name[at : at + 1] == b"/")):
        if b"\n" not in name[:start] and start < dot and b"." not in name[start:dot]:
            return True
    return False
