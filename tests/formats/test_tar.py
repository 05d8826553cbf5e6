from __future__ import annotations

import contextlib
import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheloader.errors import CorruptShard
from cacheloader.formats.tar import walk_members
from tests.support.buffers import BufferSource
from tests.support.tars import END, URI, header, packed, padded


def walked(shard: bytes) -> list[tuple[bytes, bytes]]:
    return [(name, shard[start:stop]) for name, start, stop in walk_members(BufferSource(shard), uri=URI)]


def pax_record(keyword: bytes, value: bytes) -> bytes:
    rest = b" " + keyword + b"=" + value + b"\n"
    length = len(rest) + 1
    while length != len(str(length)) + len(rest):
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


def pax(kind: bytes, *records: tuple[bytes, bytes]) -> bytes:
    block = b"".join(pax_record(*record) for record in records)
    return header(b"PaxHeader", len(block), kind=kind) + padded(block)


def test_directories_links_and_devices_are_passed_over():
    shard = (
        header(b"d/", kind=b"5")
        + header(b"old/", kind=b"\0")
        + header(b"hard", kind=b"1")
        + header(b"soft", kind=b"2")
        + header(b"pipe", kind=b"6")
        + header(b"a.txt", 3)
        + padded(b"abc")
        + END
    )
    assert walked(shard) == [(b"a.txt", b"abc")]


def test_a_kind_that_nobody_knows_is_passed_over_with_its_content():
    shard = header(b"label", 3, kind=b"V") + padded(b"xyz") + header(b"a.txt", 3, kind=b"7") + padded(b"abc") + END
    assert walked(shard) == [(b"a.txt", b"abc")]


def test_a_ustar_prefix_comes_before_the_name():
    shard = header(b"a.txt", 1, prefix=b"some/where") + padded(b"x") + END
    assert walked(shard) == [(b"some/where/a.txt", b"x")]


def test_the_access_time_that_gnu_tar_keeps_in_the_place_of_the_prefix_is_no_prefix():
    shard = header(b"a.txt", 1, magic=b"ustar  \0", prefix=b"14567231234\0") + padded(b"x") + END
    assert walked(shard) == [(b"a.txt", b"x")]


def test_a_size_in_base_256_is_understood():
    shard = header(b"a.txt", size=b"\x80" + (3).to_bytes(11, "big")) + padded(b"abc") + END
    assert walked(shard) == [(b"a.txt", b"abc")]


def test_a_size_padded_with_spaces_or_empty_is_understood():
    shard = header(b"a.txt", size=b"          3 ") + padded(b"abc") + header(b"b.txt", size=bytes(12)) + END
    assert walked(shard) == [(b"a.txt", b"abc"), (b"b.txt", b"")]


def test_a_checksum_over_signed_characters_is_accepted():
    name = "größe.txt".encode()
    assert header(name, 1, signed=True) != header(name, 1)
    assert walked(header(name, 1, signed=True) + padded(b"x") + END) == [(name, b"x")]


def test_a_header_full_of_high_bytes_has_a_valid_checksum_too():
    name = b"\xff" * 100
    shard = header(name, 1, prefix=b"\xff" * 155, magic=b"\xff" * 8) + padded(b"x") + END
    assert sum(shard[:512]) > 65521
    assert walked(shard) == [(name, b"x")]


@given(st.integers(0, 511), st.integers(1, 255))
def test_any_single_changed_byte_of_a_header_is_noticed(at, change):
    shard = bytearray(header(b"a.txt", 3) + padded(b"abc") + header(b"b.txt", 1) + padded(b"x") + END)
    shard[1024 + at] ^= change
    if 148 <= at < 156:  # the checksum's own padding may change without harm
        try:
            members = walked(bytes(shard))
        except CorruptShard:
            return
        assert members == [(b"a.txt", b"abc"), (b"b.txt", b"x")]
    else:
        with pytest.raises(CorruptShard, match="offset 1024"):
            walked(bytes(shard))


MIXED = packed([("a.txt", b"a" * 700), ("n" * 150 + ".txt", b"b"), ("c.txt", b"")], format=tarfile.GNU_FORMAT) + packed(
    [("ü" * 80 + ".txt", b"x"), ("d.txt", b"dd")], format=tarfile.PAX_FORMAT, mtime=1.5
)


@given(st.integers(0, len(MIXED) // 512 - 1), st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=6))
@settings(max_examples=500)
def test_a_header_that_is_wrong_under_a_right_checksum_never_leads_outside_of_the_shard(block, changes):
    shard = bytearray(MIXED.replace(END, b""))
    at = block * 512 % len(shard)
    for offset, value in changes:
        shard[at + offset] = value
    shard[at + 148 : at + 156] = b" " * 8
    shard[at + 148 : at + 156] = b"%06o\0 " % sum(shard[at : at + 512])
    with contextlib.suppress(CorruptShard):  # anything else, such as a read beyond the end, is a failure
        assert sum(len(content) for _, content in walked(bytes(shard))) <= len(shard)


def test_pax_path_and_size_go_before_those_of_the_header():
    shard = pax(b"x", (b"path", b"long/name.txt"), (b"size", b"3")) + header(b"short", 0) + padded(b"abc")
    shard += header(b"next.txt", 1) + padded(b"x") + END
    assert walked(shard) == [(b"long/name.txt", b"abc"), (b"next.txt", b"x")]


def test_a_global_pax_header_holds_for_all_and_a_local_one_goes_before_it():
    shard = pax(b"g", (b"path", b"all.txt"), (b"comment", b"hello")) + header(b"a.txt", 1) + padded(b"x")
    shard += pax(b"x", (b"path", b"own.txt")) + header(b"b.txt", 1) + padded(b"y") + END
    assert walked(shard) == [(b"all.txt", b"x"), (b"own.txt", b"y")]


def test_a_gnu_long_link_before_a_long_name_changes_nothing():
    name = b"n" * 300 + b".txt"
    shard = header(b"././@LongLink", 201, kind=b"K") + padded(b"l" * 200 + b"\0")
    shard += header(b"././@LongLink", len(name) + 1, kind=b"L") + padded(name + b"\0")
    shard += header(name[:100], 1) + padded(b"x") + END
    assert walked(shard) == [(name, b"x")]


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        (header(b"a", 3, kind=b"S") + padded(b"abc") + END, "sparse"),
        (pax(b"x", (b"GNU.sparse.major", b"1")) + header(b"a", 3) + padded(b"abc") + END, "sparse"),
        (pax(b"x", (b"size", b"many")) + header(b"a", 3) + padded(b"abc") + END, "no number"),
        (header(b"x", 8, kind=b"x") + padded(b"99 path=") + header(b"a") + END, "PAX record"),
        (header(b"x", 8, kind=b"x") + padded(b"8 path=a") + header(b"a") + END, "PAX record"),
        (header(b"x", 1 << 21, kind=b"L") + bytes(1 << 21), "extended header of 2097152 bytes"),
        (pax(b"x", (b"path", b"b")) + END, "no member behind it"),
        (pax(b"x", (b"path", b"b")), "no member behind it"),
        (header(b"a", size=b"\xff" * 12) + END, "no number"),
        (header(b"a", size=b"00000000008\0") + END, "no octal number"),
        (b"", "holds 0 bytes|is empty"),
        (b"short", "cut off at offset 0: a header needs bytes up to 512 and the shard ends at 5"),
        (b"\x1f\x8b" + bytes(600), "compressed with gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), "compressed with zstd"),
        (b"<html>" * 200, "no number"),
    ],
)
def test_what_cannot_be_read_is_named(shard, expected):
    with pytest.raises(CorruptShard, match=expected) as caught:
        walked(shard)
    assert URI in str(caught.value)
    assert caught.value.uri == URI


def test_content_that_is_cut_off_is_named_with_its_offsets():
    shard = packed([("a.txt", b"x"), ("b.txt", b"y" * 2000)])[:2000]
    with pytest.raises(CorruptShard, match=r"cut off at offset 1536: member 'b.txt' needs bytes up to 3584 .* at 2000"):
        walked(shard)


def test_an_end_between_two_members_without_zero_blocks_is_taken_for_a_cut():
    shard = packed([("a.txt", b"x"), ("b.txt", b"y")])
    with pytest.raises(CorruptShard, match="at offset 1024: it ends there without an end-of-archive block"):
        walked(shard[:1024])
    assert walked(shard[:1024] + END) == [(b"a.txt", b"x")]


def test_whatever_stands_behind_the_first_zero_block_is_ignored_as_tarfile_does():
    first, second = packed([("a.txt", b"x")]), packed([("b.txt", b"y")])
    assert walked(first + second) == [(b"a.txt", b"x")]
    with tarfile.open(fileobj=io.BytesIO(first + second), mode="r|") as archive:
        assert archive.getnames() == ["a.txt"]


def test_a_header_larger_than_the_buffer_and_members_far_apart_are_found():
    members = [("a.txt", b"a" * 3_000_000), ("n" * 2000 + ".txt", b"b"), ("c.txt", b"c" * 1_048_064), ("d.txt", b"d")]
    assert walked(packed(members)) == [(name.encode(), content) for name, content in members]


class CountingSource(BufferSource):
    """A shard in memory that counts the bytes read of it."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.read_bytes = 0

    def read(self, start: int, stop: int) -> bytes:
        self.read_bytes += stop - start
        return super().read(start, stop)


def test_the_content_of_large_members_is_not_read():
    source = CountingSource(b"".join(header(b"%d.bin" % i, 100_000) + padded(bytes(100_000)) for i in range(20)) + END)
    assert len(list(walk_members(source, uri=URI))) == 20
    assert source.read_bytes < 0.05 * source.size_bytes


def test_small_members_are_read_many_at_once():
    source = CountingSource(b"".join(header(b"%d.txt" % i, 3) + padded(b"abc") for i in range(5000)) + END)
    assert len(list(walk_members(source, uri=URI))) == 5000
    assert source.read_bytes < 1.1 * source.size_bytes
