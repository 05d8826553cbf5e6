"""The sample index of a tar shard as one flat block, and how it is written; ``tarindex`` reads it.

Layout, little endian; every array holds integers of ``width`` bytes::

    num_samples int64 | magic 8 bytes | crc32 uint32 of all that follows | width uint32 (4 or 8)
    shard_bytes int64 | num_members int64 | num_layouts int64 | num_slots int64 | num_fields int64 | key_bytes int64
    first_member [num_samples + 1] | key_stop [num_samples] | layout [num_samples]
    member_start [num_members] | member_size [num_members]
    first_slot [num_layouts + 1] | slot_field [num_slots] | field_stop [num_fields]
    all keys, one behind the other | all field names, likewise

Sample ``s`` has the members ``first_member[s]`` up to ``first_member[s + 1]``. Its layout names their fields: member
``i`` of the sample has field ``slot_field[first_slot[layout[s]] + i]``. Most shards have a single layout.

No numpy here: the process that makes indexes starts without it, in a third of the time and half of the memory.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAGIC = b"CLTARIX1"
HEAD = struct.Struct("<q8sII6q")
CHECKED_FROM = 20
"""Behind the checksum; the sample count before it is compared on its own."""


def pack_index(
    *,
    shard_bytes: int,
    keys: Sequence[bytes],
    layouts: Sequence[int],
    first_member: Sequence[int],
    member_start: Sequence[int],
    member_size: Sequence[int],
    slots: Iterable[Sequence[int]],
    fields: Sequence[str],
) -> bytes:
    """The block for one shard.

    Args:
        shard_bytes: Size of the shard.
        keys: Of each sample.
        layouts: Number of each sample's layout.
        first_member: Of each sample, and the number of members at the end.
        member_start: First byte of each member's content.
        member_size: Bytes of each member's content.
        slots: Of each layout, the numbers of its fields.
        fields: Names of the fields.
    """
    names = [name.encode("utf-8", "surrogateescape") for name in fields]
    slot_lists = list(slots)
    all_keys, all_names = b"".join(keys), b"".join(names)
    width = 4 if max(shard_bytes, len(all_keys), len(all_names)) < 1 << 32 else 8
    slot_field = [number for numbers in slot_lists for number in numbers]
    columns: list[Iterable[int]] = [
        first_member,
        accumulate(map(len, keys)),
        layouts,
        member_start,
        member_size,
        accumulate(map(len, slot_lists), initial=0),
        slot_field,
        accumulate(map(len, names)),
    ]
    arrays = [_packed(column, width=width) for column in columns]
    counts = len(member_start), len(slot_lists), len(slot_field), len(names)
    head = HEAD.pack(len(keys), MAGIC, 0, width, shard_bytes, *counts, len(all_keys))
    block = bytearray(b"".join([head, *arrays, all_keys, all_names]))
    block[16:20] = zlib.crc32(memoryview(block)[CHECKED_FROM:], len(keys) & 0xFFFFFFFF).to_bytes(4, "little")
    return bytes(block)


def _packed(numbers: Iterable[int], *, width: int) -> bytes:
    packed = array("I" if width == 4 else "Q", numbers)
    assert packed.itemsize == width
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
