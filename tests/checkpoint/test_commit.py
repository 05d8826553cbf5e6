"""The commit record and the names of saves."""

from __future__ import annotations

import contextlib
import json

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.checkpoint.commit import Commit, Name, Part, decode, encode, parse_name
from cacheloader.errors import CheckpointError

COMMIT = Commit(
    serial=12,
    step=300,
    attempt="0a1b2c3d",
    world_size=4,
    saved_at="2026-01-01T00:00:00+00:00",
    versions={"torch": "2.13"},
    files={"__0_0.distcp": Part(size_bytes=10, crc32c=7), ".metadata": Part(size_bytes=3, crc32c=2**32 - 1)},
)
parts = st.builds(Part, size_bytes=st.integers(0, 2**50), crc32c=st.integers(0, 2**32 - 1))
commits = st.builds(
    Commit,
    serial=st.integers(1, 10**9),
    step=st.integers(0, 10**12),
    attempt=st.text("0123456789abcdef", min_size=8, max_size=8),
    world_size=st.integers(1, 10**5),
    versions=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    files=st.dictionaries(st.text(min_size=1, max_size=20), parts, max_size=5),
)


@given(commits)
def test_a_record_survives_encoding(commit: Commit) -> None:
    assert decode(encode(commit)) == commit
    assert parse_name(str(commit.name)) == commit.name


@given(commits, st.data())
def test_a_record_with_one_character_changed_is_none(commit: Commit, data: st.DataObject) -> None:
    whole = encode(commit)
    at = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    broken = bytearray(whole)
    broken[at] ^= 1 << bit
    with contextlib.suppress(CheckpointError):
        assert decode(bytes(broken)) == commit  # white space, or the case of a hexadecimal digit


@given(st.integers(0, len(encode(COMMIT)) - 3))
def test_a_torn_record_is_none(length: int) -> None:
    with pytest.raises(CheckpointError, match="incomplete"):
        decode(encode(COMMIT)[:length])


def test_a_record_of_a_newer_format_is_refused_by_its_version() -> None:
    newer = encode(COMMIT).replace(b'"cacheloader_checkpoint": 1', b'"cacheloader_checkpoint": 2')
    with pytest.raises(CheckpointError, match="format version 2"):
        decode(newer)


def test_a_record_with_a_right_checksum_and_wrong_fields_is_none() -> None:
    for change in ({"files": {"x": ["1", "zz"]}}, {"files": 3}, {"more": 1}):
        record = json.loads(encode(COMMIT)) | change
        record.pop("crc32c")
        record["crc32c"] = f"{google_crc32c.value(json.dumps(record, sort_keys=True).encode()):08x}"
        with pytest.raises(CheckpointError, match="other fields"):
            decode(json.dumps(record).encode())
    with pytest.raises(CheckpointError, match="not one"):
        decode(b"[" * 100_000)


def test_saves_are_ordered_by_their_serial_whatever_their_step() -> None:
    before, after = (Name(serial=s, step=t, attempt="00000000") for s, t in ((9, 500), (10, 100)))
    assert before < after
    assert parse_name("step-100") is None
    assert parse_name("000010-step-100-0000000") is None
