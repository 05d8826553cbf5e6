from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import lmdb
import pytest
from cacheloader_daemon.store import table as table_module
from cacheloader_daemon.store.names import BlobName
from cacheloader_daemon.store.row import Row, unpack_many, unpack_row
from cacheloader_daemon.store.table import LAYOUT, BlobTable, TableBroken
from hypothesis import given
from hypothesis import strategies as st

from tests.daemon.store.disks import key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

numbers = st.integers(0, 2**62)
checksums = st.integers(0, 2**32 - 1)
names = st.builds(
    BlobName,
    key=st.binary(min_size=16, max_size=16),
    size_bytes=st.integers(0, 10**17),
    crc32c=checksums,
    index_bytes=st.integers(0, 10**17),
    index_crc32c=checksums,
)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[BlobTable]:
    table = BlobTable.open(tmp_path / "lmdb")
    yield table
    table.close()


def row(number: int, *, accessed_ns: int = 0) -> Row:
    name = BlobName(key=key(number), size_bytes=number, crc32c=1, index_bytes=2, index_crc32c=3)
    return Row(name=name, used_bytes=4096, accessed_ns=accessed_ns)


@given(names)
def test_names_say_everything_and_are_read_back(name: BlobName) -> None:
    assert BlobName.parse(name.data, folder=name.folder) == (name, True)
    assert BlobName.parse(name.index, folder=name.folder) == (name, False)
    assert BlobName.parse(name.data, folder="zz") is None


@given(st.text(max_size=120))
def test_other_names_are_not_taken_for_blobs(text: str) -> None:
    assert BlobName.parse(text, folder=text[:2]) is None


def test_a_number_with_leading_zeros_is_another_file() -> None:
    name = BlobName(key=key(1), size_bytes=7, crc32c=0, index_bytes=1, index_crc32c=0)
    assert BlobName.parse(name.data.replace("-7-", "-07-"), folder=name.folder) is None


rows_of_any_kind = st.builds(Row, name=names, used_bytes=numbers, accessed_ns=numbers, suspect=st.booleans())


def put(table: BlobTable, rows: Iterable[Row]) -> None:
    table.write({row.name.key: row.pack() for row in rows})


@given(rows_of_any_kind)
def test_a_row_is_packed_and_read_back(row: Row) -> None:
    assert unpack_row(row.name.key, row.pack()) == row
    name = row.name
    assert list(unpack_many([row.pack()])) == [
        (
            name.size_bytes,
            name.crc32c,
            name.index_bytes,
            name.index_crc32c,
            row.used_bytes,
            row.accessed_ns,
            row.suspect,
        )
    ]


@given(st.lists(rows_of_any_kind))
def test_rows_come_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    table = BlobTable.open(tmp_path_factory.mktemp("table"))
    put(table, rows)
    last = {row.name.key: row.pack() for row in rows}
    assert table.rows() == last
    table.write({shard: None for shard in last if shard[0] % 2} | {b"\xff" * 16: None})
    assert table.rows() == {shard: row for shard, row in last.items() if not shard[0] % 2}
    table.close()


def test_a_full_map_grows_by_itself_and_takes_deletes_too(tmp_path: Path) -> None:
    table = BlobTable.open(tmp_path / "lmdb", map_bytes=64 * 2**10)
    put(table, (row(number) for number in range(5000)))
    assert len(table.rows()) == 5000
    table.write({key(number): None for number in range(4999)})
    assert list(table.rows()) == [key(4999)]
    table.close()


def test_many_threads_read_and_write_at_once(table: BlobTable) -> None:
    failures: list[BaseException] = []

    def work(turn: int) -> None:
        try:
            for number in range(turn, 400, 4):
                put(table, [row(number)])
                assert table.rows()[key(number)] == row(number).pack()
                if number % 2:
                    table.write({key(number): None})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == []
    assert sorted(table.rows()) == sorted(key(number) for number in range(0, 400, 2))


def test_sample_counts_remembered_longest_ago_give_way(table: BlobTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_SAMPLE_COUNTS", 10)
    for number in range(10):
        table.remember_samples(key(number), number)
    table.remember_samples(key(0), 1000)
    table.remember_samples(key(1), 1)
    for number in range(10, 13):
        table.remember_samples(key(number), number)
    kept = {number: table.samples(key(number)) for number in range(13) if table.samples(key(number)) is not None}
    assert kept == {0: 1000, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 9: 9, 10: 10, 11: 11, 12: 12}


def test_the_file_lets_nobody_else_in(table: BlobTable, tmp_path: Path) -> None:
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "lmdb").iterdir())


def test_rewriting_many_rows_does_not_make_the_file_much_larger(table: BlobTable, tmp_path: Path) -> None:
    put(table, (row(number) for number in range(5000)))
    before = (tmp_path / "lmdb" / "data.mdb").stat().st_size
    for turn in range(20):
        put(table, (row(number, accessed_ns=turn) for number in range(5000)))
    assert (tmp_path / "lmdb" / "data.mdb").stat().st_size < before + 2**20


@pytest.mark.parametrize("block", [b"x" * 100, b"\0" * 8192, os.urandom(100_000)])
def test_a_file_that_is_no_index_is_told_apart(tmp_path: Path, block: bytes) -> None:
    (tmp_path / "data.mdb").write_bytes(block)
    with pytest.raises(TableBroken):
        BlobTable.open(tmp_path)


def test_a_truncated_file_is_told_apart_before_it_is_read(tmp_path: Path) -> None:
    table = BlobTable.open(tmp_path)
    put(table, (row(number) for number in range(1000)))
    table.close()
    size_bytes = (tmp_path / "data.mdb").stat().st_size
    os.truncate(tmp_path / "data.mdb", size_bytes - 4096)
    with pytest.raises(TableBroken, match="ends at byte"):
        BlobTable.open(tmp_path)


def test_an_index_of_another_layout_is_told_apart(tmp_path: Path) -> None:
    BlobTable.open(tmp_path).close()
    with lmdb.open(str(tmp_path), max_dbs=5) as env, env.begin(write=True, db=env.open_db(b"about")) as txn:
        txn.put(b"layout", b"99")
    with pytest.raises(TableBroken, match="b'99' and this version " + repr(LAYOUT)):
        BlobTable.open(tmp_path)


def test_rows_of_another_length_are_told_apart(table: BlobTable) -> None:
    table.write({key(1): b"short"})
    with pytest.raises(TableBroken, match="not of 41 bytes"):
        table.rows()
