"""What a shard format is, and what it reads from."""

from __future__ import annotations

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
