"""Where the samples of a tar shard lie, as one flat block: mapped, not parsed, so that a million samples open at once.

``tarblock`` has the layout.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from cacheloader.errors import CorruptShard
from cacheloader.formats.tarblock import CHECKED_FROM, HEAD, MAGIC

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    _ascii_keys: str | None = field(repr=False)  # the same as text, if a byte is a character: slices of it are cheap
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
        text = self._ascii_keys
        if text is not None:
            return [text[start:stop] for start, stop in zip(starts, stops, strict=True)]
        keys = self._keys
        return [_text(keys[start:stop]) for start, stop in zip(starts, stops, strict=True)]

    @classmethod
    def from_block(cls, block: bytes, *, shard_bytes: int, uri: str) -> Self:
        """The index in ``block``.

        Args:
            block: As ``tarblock.pack_index`` made it; must stay unchanged for as long as the index lives.
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
        num_samples, magic, checksum, width, shard_bytes, *counts, key_bytes = HEAD.unpack_from(view)
        if magic != MAGIC:
            raise ValueError(f"it starts with {bytes(magic)!r}, not {MAGIC!r}")
        if zlib.crc32(view[CHECKED_FROM:], num_samples & 0xFFFFFFFF) != checksum:
            raise ValueError("its checksum is wrong")
        num_members, num_layouts, num_slots, num_fields = counts
        if width not in {4, 8} or not all(0 <= count < _LIMIT for count in (num_samples, *counts, key_bytes)):
            raise ValueError("its header is impossible")
        lengths = [num_samples + 1, num_samples, num_samples, num_members, num_members]
        lengths += [num_layouts + 1, num_slots, num_fields]
        keys_start = HEAD.size + width * sum(lengths)
        if keys_start + key_bytes > len(view):
            raise ValueError("it is cut off")
        arrays = []
        position = HEAD.size
        for length in lengths:
            arrays.append(np.frombuffer(view, dtype=f"<u{width}", count=length, offset=position))
            position += width * length
        first_member, key_stop, layout, member_start, member_size, first_slot, slot_field, field_stop = arrays
        keys = view[keys_start : keys_start + key_bytes]
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
            _keys=keys,
            _ascii_keys=_ascii(keys),
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


def _ascending(name: str, numbers: NDArray[np.unsignedinteger], *, stop: int, start: int | None = None) -> None:
    whole = (int(numbers[-1]) if len(numbers) else 0) == stop
    if not whole or np.any(numbers[1:] < numbers[:-1]) or (start is not None and int(numbers[0]) != start):
        raise ValueError(f"its {name} does not ascend to {stop}")


def _below(name: str, numbers: NDArray[np.unsignedinteger], stop: int) -> None:
    if len(numbers) and int(numbers.max()) >= stop:
        raise ValueError(f"its {name} reaches {int(numbers.max())} of {stop}")


def _ascii(encoded: memoryview) -> str | None:
    whole = bytes(encoded)
    return whole.decode("ascii") if whole.isascii() else None


def _text(encoded: memoryview) -> str:
    return str(encoded, "utf-8", "surrogateescape")
