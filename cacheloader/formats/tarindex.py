"""Where the samples of a tar shard lie, as one flat block: mapped, not parsed, so that a million samples open at once.

Layout, little endian; every array holds integers of ``width`` bytes::

    num_samples int64 | magic 8 bytes | crc32 uint32 of all that follows | width uint32 (4 or 8)
    shard_bytes int64 | num_members int64 | num_layouts int64 | num_slots int64 | num_fields int64 | key_bytes int64
    first_member [num_samples + 1] | key_stop [num_samples] | layout [num_samples]
    member_start [num_members] | member_size [num_members]
    first_slot [num_layouts + 1] | slot_field [num_slots] | field_stop [num_fields]
    all keys, one behind the other | all field names, likewise

Sample ``s`` has the members ``first_member[s]`` up to ``first_member[s + 1]``. Its layout names their fields: member
``i`` of the sample has field ``slot_field[first_slot[layout[s]] + i]``. Most shards have a single layout.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from cacheloader.errors import CorruptShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

MAGIC = b"CLTARIX1"
_HEAD = struct.Struct("<q8sII6q")
_CHECKED_FROM = 20  # behind the checksum; the sample count before it is compared on its own
_LIMIT = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TarIndex:
    """The arrays of one index, each as a view of the block.

    Attributes:
        num_samples: How many samples the shard holds.
        first_member: [num_samples + 1]; members of sample s are ``first_member[s]`` to ``first_member[s + 1]``.
        layout: [num_samples]; which fields the sample has.
        member_start: [num_members]; first byte of the content.
        member_size: [num_members]; bytes of content.
        first_slot: [num_layouts + 1]; where the layout's fields start in ``slot_field``.
        slot_field: [num_slots]; number of the field.
    """

    num_samples: int
    first_member: NDArray[np.unsignedinteger]
    layout: NDArray[np.unsignedinteger]
    member_start: NDArray[np.unsignedinteger]
    member_size: NDArray[np.unsignedinteger]
    first_slot: NDArray[np.unsignedinteger]
    slot_field: NDArray[np.unsignedinteger]
    _key_stop: NDArray[np.unsignedinteger] = field(repr=False)
    _field_stop: NDArray[np.unsignedinteger] = field(repr=False)
    _keys: memoryview = field(repr=False)
    _fields: memoryview = field(repr=False)

    @property
    def num_fields(self) -> int:
        """How many different fields the samples have."""
        return len(self._field_stop)

    def field(self, number: int) -> str:
        """Name of field ``number``."""
        start = int(self._field_stop[number - 1]) if number else 0
        return _text(self._fields[start : int(self._field_stop[number])])

    def fields_of(self, layout: int) -> tuple[str, ...]:
        """Field names of a layout, in the order of its members."""
        slots = self.slot_field[int(self.first_slot[layout]) : int(self.first_slot[layout + 1])]
        return tuple(self.field(number) for number in slots.tolist())

    def keys(self, samples: NDArray[np.int64]) -> list[str]:
        """Keys of the samples at these positions."""
        stops = self._key_stop[samples].tolist()
        starts = np.where(samples > 0, self._key_stop[samples - 1], 0).tolist()
        keys = self._keys
        return [_text(keys[start:stop]) for start, stop in zip(starts, stops, strict=True)]

    @classmethod
    def from_block(cls, block: bytes, *, shard_bytes: int, uri: str) -> Self:
        """The index in ``block``.

        Args:
            block: As ``pack_index`` made it; must stay unchanged for as long as the index lives.
            shard_bytes: Size of the shard that it is to be used with.
            uri: The shard, named in errors.

        Raises:
            CorruptShard: The block is damaged, of another version, or made for another shard.
        """
        view = memoryview(block).cast("B").toreadonly()
        try:
            index, own_shard_bytes = cls._parse(view)
        except (ValueError, struct.error) as error:
            raise CorruptShard(
                f"the sample index of shard {uri} ({len(view)} bytes) is unusable: {error}; "
                "drop the shard from the cache, and it will be indexed again",
                uri=uri,
            ) from error
        if own_shard_bytes != shard_bytes:
            raise CorruptShard(
                f"the sample index of shard {uri} was made for {own_shard_bytes} bytes and the shard holds "
                f"{shard_bytes}; drop the shard from the cache, and it will be indexed again",
                uri=uri,
            )
        return index

    @classmethod
    def _parse(cls, view: memoryview) -> tuple[Self, int]:
        num_samples, magic, checksum, width, shard_bytes, *counts, key_bytes = _HEAD.unpack_from(view)
        if magic != MAGIC:
            raise ValueError(f"it starts with {bytes(magic)!r}, not {MAGIC!r}")
        if zlib.crc32(view[_CHECKED_FROM:], num_samples & 0xFFFFFFFF) != checksum:
            raise ValueError("its checksum is wrong")
        num_members, num_layouts, num_slots, num_fields = counts
        if width not in {4, 8} or not all(0 <= count < _LIMIT for count in (num_samples, *counts, key_bytes)):
            raise ValueError("its header is impossible")
        lengths = [num_samples + 1, num_samples, num_samples, num_members, num_members]
        lengths += [num_layouts + 1, num_slots, num_fields]
        keys_start = _HEAD.size + width * sum(lengths)
        if keys_start + key_bytes > len(view):
            raise ValueError("it is cut off")
        arrays = []
        position = _HEAD.size
        for length in lengths:
            arrays.append(np.frombuffer(view, dtype=f"<u{width}", count=length, offset=position))
            position += width * length
        first_member, key_stop, layout, member_start, member_size, first_slot, slot_field, field_stop = arrays
        index = cls(
            num_samples=num_samples,
            first_member=first_member,
            layout=layout,
            member_start=member_start,
            member_size=member_size,
            first_slot=first_slot,
            slot_field=slot_field,
            _key_stop=key_stop,
            _field_stop=field_stop,
            _keys=view[keys_start : keys_start + key_bytes],
            _fields=view[keys_start + key_bytes :],
        )
        index._validate(shard_bytes)
        return index, shard_bytes

    def _validate(self, shard_bytes: int) -> None:
        """Every number that is used to look something up points to something."""
        _ascending("first_member", self.first_member, stop=len(self.member_start), start=0)
        _ascending("first_slot", self.first_slot, stop=len(self.slot_field), start=0)
        _ascending("key_stop", self._key_stop, stop=len(self._keys))
        _ascending("field_stop", self._field_stop, stop=len(self._fields))
        _below("layout", self.layout, len(self.first_slot) - 1)
        _below("slot_field", self.slot_field, len(self._field_stop))
        _below("member_start", self.member_start, shard_bytes + 1)
        if np.any(self.member_size > shard_bytes - self.member_start.astype(np.int64)):
            raise ValueError("a member ends behind the shard")
        if np.any(np.diff(self.first_slot)[self.layout] != np.diff(self.first_member)):
            raise ValueError("a sample has another number of members than of fields")


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
    columns: list[Sequence[int] | NDArray[np.int64]] = [
        first_member,
        np.cumsum([len(key) for key in keys], dtype=np.int64),
        layouts,
        member_start,
        member_size,
        np.cumsum([0, *map(len, slot_lists)], dtype=np.int64),
        [number for numbers in slot_lists for number in numbers],
        np.cumsum([len(name) for name in names], dtype=np.int64),
    ]
    arrays = [np.asarray(column, dtype=f"<u{width}").tobytes() for column in columns]
    counts = len(member_start), len(slot_lists), len(columns[6]), len(names)
    head = _HEAD.pack(len(keys), MAGIC, 0, width, shard_bytes, *counts, len(all_keys))
    block = bytearray(b"".join([head, *arrays, all_keys, all_names]))
    block[16:20] = zlib.crc32(memoryview(block)[_CHECKED_FROM:], len(keys) & 0xFFFFFFFF).to_bytes(4, "little")
    return bytes(block)


def _ascending(name: str, numbers: NDArray[np.unsignedinteger], *, stop: int, start: int | None = None) -> None:
    whole = (int(numbers[-1]) if len(numbers) else 0) == stop
    if not whole or np.any(numbers[1:] < numbers[:-1]) or (start is not None and int(numbers[0]) != start):
        raise ValueError(f"its {name} does not ascend to {stop}")


def _below(name: str, numbers: NDArray[np.unsignedinteger], stop: int) -> None:
    if len(numbers) and int(numbers.max()) >= stop:
        raise ValueError(f"its {name} reaches {int(numbers.max())} of {stop}")


def _text(encoded: memoryview) -> str:
    return str(encoded, "utf-8", "surrogateescape")
