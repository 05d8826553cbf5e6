"""Some batches of one source that were located together: what that costs is paid once for all of them.

A stretch knows where all its bytes lie and has read none of them. Its batches may be read in any order and by several
threads at once, for as long as the leases that it was made of are held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.formats.base import Located, assembled
from cacheloader.formats.coalesce import coalesce

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from cacheloader.formats.base import Sample

_SHARD_BITS = 44
"""Reads of all shards are merged in one go, each shard and batch in an address space of its own of 16 TiB."""

_NOTHING = Located(keys=[], names=[], **dict.fromkeys(("num_values", "start", "size"), np.empty(0, dtype=np.int64)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardPart:
    """What a stretch needs of one shard.

    Attributes:
        read_each: Reads byte ranges of the shard, by their starts and stops.
        place: int64 [n], ascending; the samples' places in the stretch.
        located: Where these samples lie.
    """

    read_each: Callable[[list[int], list[int]], list[bytes]]
    place: NDArray[np.int64]
    located: Located


class Stretch:
    """Batches that are ready to be read.

    Args:
        parts: What to read of each shard; their places cover the stretch.
        edges: int64 [batches + 1]; first place of each batch.
    """

    def __init__(self, parts: Sequence[ShardPart], edges: NDArray[np.int64]) -> None:
        self._read_each = [part.read_each for part in parts]
        located = [part.located for part in parts] or [_NOTHING]
        num_values = np.concatenate([one.num_values for one in located])
        first_value = np.cumsum(num_values) - num_values
        at = np.argsort(np.concatenate([part.place for part in parts] or [_NOTHING.start]), kind="stable")
        names = [name for one in located for name in one.names]
        keys = [key for one in located for key in one.keys]
        order = at.tolist()
        self._names = [names[i] for i in order]
        self._keys = [keys[i] for i in order]

        # From here on everything is in place order.
        num_values = num_values[at]
        stops = np.cumsum(num_values)
        total = int(stops[-1]) if len(stops) else 0
        value = np.repeat(first_value[at] - (stops - num_values), num_values) + np.arange(total)
        part_of = np.repeat(np.arange(len(located)), [len(one.start) for one in located])[value]
        start = np.concatenate([one.start for one in located])[value]
        size = np.concatenate([one.size for one in located])[value]
        self._edges = edges.tolist()
        value_edges = np.concatenate(([0], stops))[edges]
        batch = np.repeat(np.arange(len(edges) - 1), np.diff(value_edges))
        space = batch * len(located) + part_of
        address = (space << _SHARD_BITS) + start
        reads = coalesce(address, address + size)
        read_space = reads.start >> _SHARD_BITS
        read_start = reads.start - (read_space << _SHARD_BITS)
        self._read_start = read_start.tolist()
        self._read_stop = (read_start + (reads.stop - reads.start)).tolist()
        # A run is all that one batch reads of one shard.
        heads = np.flatnonzero(np.diff(read_space, prepend=-1))
        self._run_part = (read_space[heads] % len(located)).tolist()
        self._run_edges = [*heads.tolist(), len(read_space)]
        self._batch_runs = np.searchsorted(read_space[heads], np.arange(len(edges)) * len(located)).tolist()
        self._value_edges = value_edges.tolist()
        self._value_read = reads.read
        self._value_offset = reads.offset
        self._value_size = size
        self.size_bytes = np.diff(np.concatenate(([0], np.cumsum(size)))[value_edges]).tolist()
        """Bytes of the values of each batch."""

    def read(self, batch: int) -> list[Sample]:
        """The samples of batch number ``batch``, in place order.

        Raises:
            OSError: A shard cannot be read.
        """
        blocks: list[bytes] = []
        first, stop = self._batch_runs[batch], self._batch_runs[batch + 1]
        for run in range(first, stop):
            reads = slice(self._run_edges[run], self._run_edges[run + 1])
            blocks += self._read_each[self._run_part[run]](self._read_start[reads], self._read_stop[reads])
        values = slice(self._value_edges[batch], self._value_edges[batch + 1])
        which = (self._value_read[values] - self._run_edges[first]).tolist()
        if len(which) == len(blocks):
            contents = [blocks[i] for i in which]  # every value was read by itself
        else:
            offset = self._value_offset[values]
            ends = (offset + self._value_size[values]).tolist()
            # A slice of all of a bytes object is that object: what was read alone is not copied.
            contents = [blocks[i][start:end] for i, start, end in zip(which, offset.tolist(), ends, strict=True)]
        samples = slice(self._edges[batch], self._edges[batch + 1])
        return assembled(self._keys[samples], self._names[samples], contents)
