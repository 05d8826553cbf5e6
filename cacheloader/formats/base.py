"""What a shard format is, and what it reads from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

Sample: TypeAlias = "dict[str, Any]"
"""One sample: field name to value. Tar members are ``bytes``; ``"__key__"`` is the sample's name."""


class ByteSource(Protocol):
    """Random access to the bytes of one shard."""

    @property
    def size_bytes(self) -> int:
        """Length of the shard."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Exactly the bytes ``[start, stop)``; raises ``OSError`` if they cannot be read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Located:
    """Where the values of some samples of one shard lie. All values are byte ranges of the shard.

    Attributes:
        keys: Of each sample.
        names: Of each sample, its fields in the order of its values.
        num_values: int64 [n]; values of each sample.
        start: int64 [m]; first byte of each value, sample by sample.
        size: int64 [m]; bytes of each value.
    """

    keys: list[str]
    names: list[tuple[str, ...]]
    num_values: NDArray[np.int64]
    start: NDArray[np.int64]
    size: NDArray[np.int64]


class ShardReader(Protocol):
    """The samples of one shard."""

    @property
    def num_samples(self) -> int:
        """How many samples the shard holds."""
        ...

    def read(self, samples: NDArray[np.int64]) -> list[Sample]:
        """The samples at these positions, in this order; reads that lie close together become one.

        Args:
            samples: int64 [n], each in ``[0, num_samples)``.
        """
        ...


class RangeReader(ShardReader, Protocol):
    """A reader whose samples are byte ranges, so that many of them can be located before one is read."""

    def locate(self, samples: NDArray[np.int64]) -> Located:
        """Where the samples at these positions lie; reads nothing.

        Args:
            samples: As in ``read``.
        """
        ...


class ShardFormat(Protocol):
    """One kind of shard. Instances hold no state and are safe to share."""

    @property
    def name(self) -> str:
        """The name users pass as ``format=``."""
        ...

    @property
    def suffixes(self) -> Sequence[str]:
        """File name endings by which the format is detected, such as ``".tar"``."""
        ...

    @property
    def is_ranges(self) -> bool:
        """Whether samples are plain byte ranges and need no computing: ``open`` then returns a ``RangeReader``."""
        ...

    def build_index(self, data: ByteSource, *, uri: str) -> bytes:
        """Where each sample lies, as one block of bytes that starts with the sample count (see ``index_samples``).

        Runs once per node, when the shard is admitted.

        Raises:
            CorruptShard: ``data`` is no whole shard of this format; the text names ``uri`` and the offset.
        """
        ...

    def open(self, data: ByteSource, index: bytes, *, uri: str, columns: Sequence[str] | None = None) -> ShardReader:
        """A reader over ``data`` with an index that ``build_index`` made.

        Args:
            data: The shard.
            index: The block from ``build_index``.
            uri: Named in errors.
            columns: Fields to read, all if ``None``; ``"__key__"`` is always there.
        """
        ...


def index_samples(index: bytes) -> int:
    """The sample count at the start of every index block (int64, little endian)."""
    return int.from_bytes(index[:8], "little")


def assembled(keys: Sequence[str], names: Sequence[tuple[str, ...]], values: Sequence[bytes]) -> list[Sample]:
    """Samples of their parts.

    Args:
        keys: Of each sample.
        names: Of each sample, its fields.
        values: Of all samples, one behind the other.
    """
    if sum(map(len, names)) != len(values):
        raise ValueError(f"{len(values)} values for {sum(map(len, names))} fields")
    if len(set(names)) == 1:  # the usual case, which zip makes without a line of python a sample
        fields = names[0]
        columns = [values[i :: len(fields)] for i in range(len(fields))]
        own = ("__key__", *fields)
        return [dict(zip(own, row, strict=True)) for row in zip(keys, *columns, strict=True)]
    samples: list[Sample] = []
    rest = iter(values)
    for key, fields in zip(keys, names, strict=True):
        sample: dict[str, Any] = {"__key__": key}
        sample.update(zip(fields, rest, strict=False))  # the fields end first, and no value is lost
        samples.append(sample)
    return samples
