from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import CorruptShard
from cacheloader.formats.base import index_samples
from cacheloader.formats.tarblock import pack_index
from cacheloader.formats.tarindex import TarIndex
from tests.support.tars import URI

SHARD_BYTES = 10_000


def block(shard_bytes: int = SHARD_BYTES, **changes) -> bytes:
    columns = {
        "keys": [b"a", b"bb", b"", "ü".encode()],
        "layouts": [0, 1, 0, 1],
        "first_member": [0, 2, 3, 5, 6],
        "member_start": [512, 1024, 2048, 3072, 4096, 5120],
        "member_size": [1, 2, 3, 4, 5, 6],
        "slots": [(0, 1), (2,)],
        "fields": ["jpg", "größe", "cls"],
    }
    return pack_index(shard_bytes=shard_bytes, **{**columns, **changes})


def opened(index: bytes, shard_bytes: int = SHARD_BYTES) -> TarIndex:
    return TarIndex.from_block(index, shard_bytes=shard_bytes, uri=URI)


@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 1 << 33])
def test_what_was_packed_is_read_back(shard_bytes):
    packed = block(shard_bytes)
    index = opened(packed, shard_bytes)
    assert index_samples(packed) == index.num_samples == 4
    assert index.keys(np.array([3, 0, 2, 1, 0])) == ["ü", "a", "", "bb", "a"]
    assert index.fields_of(0) == ("jpg", "größe")
    assert index.fields_of(1) == ("cls",)
    assert index.member_start.tolist() == [512, 1024, 2048, 3072, 4096, 5120]
    assert index.first_member.dtype.itemsize == (4 if shard_bytes == SHARD_BYTES else 8)


def test_an_index_without_samples_is_an_index():
    empty = block(keys=[], layouts=[], first_member=[0], member_start=[], member_size=[], slots=[], fields=[])
    assert opened(empty).num_samples == 0
    assert opened(empty).keys(np.array([], dtype=np.int64)) == []


def test_offsets_beyond_four_gigabytes_survive():
    far = [5 << 32] * 6
    assert opened(block(6 << 32, member_start=far), 6 << 32).member_start.tolist() == far


@given(st.integers(0, len(block()) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at, change):
    damaged = bytearray(block())
    damaged[at] ^= change
    with pytest.raises(CorruptShard, match="unusable") as caught:
        opened(bytes(damaged))
    assert URI in str(caught.value)


@given(st.integers(0, len(block()) - 1))
def test_an_index_that_is_cut_off_is_noticed(stop):
    with pytest.raises(CorruptShard, match="unusable"):
        opened(block()[:stop])


@given(st.binary(max_size=400))
def test_bytes_at_random_are_no_index(junk):
    with pytest.raises(CorruptShard):
        opened(junk)


def test_an_index_of_another_shard_is_refused():
    with pytest.raises(CorruptShard, match="made for 10000 bytes and the shard holds 9999"):
        opened(block(), 9_999)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"first_member": [0, 2, 3, 5, 7]}, "first_member"),
        ({"first_member": [0, 3, 2, 5, 6]}, "first_member"),
        ({"first_member": [1, 2, 3, 5, 6]}, "first_member"),
        ({"first_member": [0, 1, 3, 5, 6]}, "another number of members"),
        ({"layouts": [0, 2, 0, 1]}, "layout reaches 2 of 2"),
        ({"slots": [(0, 1), (3,)]}, "slot_field reaches 3 of 3"),
        ({"member_start": [512, 1024, 2048, 3072, 4096, 10_001]}, "member_start"),
        ({"member_size": [1, 2, 3, 4, 5, 6000]}, "ends behind the shard"),
    ],
)
def test_numbers_that_point_nowhere_are_refused_even_under_a_right_checksum(changes, expected):
    with pytest.raises(CorruptShard, match=expected):
        opened(block(**changes))


def test_an_open_index_holds_no_python_object_per_sample():
    num_samples = 10_000
    index = opened(
        block(
            shard_bytes=1 << 30,
            keys=[b"%08d" % i for i in range(num_samples)],
            layouts=[0] * num_samples,
            first_member=list(range(num_samples + 1)),
            member_start=[512 + 1024 * i for i in range(num_samples)],
            member_size=[500] * num_samples,
            slots=[(0,)],
        ),
        1 << 30,
    )
    held = [getattr(index, field.name) for field in dataclasses.fields(index)]
    assert all(isinstance(value, int | str | memoryview | np.ndarray) for value in held)
    assert not any(isinstance(value, np.ndarray) and value.dtype == object for value in held)
