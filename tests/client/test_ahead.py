"""Threads that read ahead: in order, with room for a few, planned early, and never in each other's way."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.ahead import Ahead, Planned, ReadAhead, in_turn
from cacheloader.formats.coalesce import ALONE_BYTES
from tests.support.waiting import wait_until


class Stretches:
    """Plans so many batches at once, and notes what it was asked for."""

    def __init__(self, *, length: int = 2, size_bytes: int = 0, read: Any = lambda row: row) -> None:
        self.length = length
        self.size_bytes = size_bytes
        self.read = read
        self.planned: list[int] = []
        self.done = 0

    def plan(self, rows: Any) -> list[Planned]:
        rows = rows[: self.length]
        self.planned += rows
        return [
            Planned(row=row, num_samples=1, size_bytes=self.size_bytes, read=lambda row=row: self.read(row))
            for row in rows
        ]

    def advance(self, row: int) -> None:
        assert row >= self.done
        self.done = row


def opened(planner: Stretches, rows: range, **options: int) -> Ahead:
    return Ahead(
        planner, rows, ReadAhead(**{"num_threads": 2, "num_batches": 3} | options), lambda row, batch: (row, batch)
    )


@given(
    num_rows=st.integers(0, 40),
    step=st.integers(1, 3),
    length=st.integers(1, 9),
    num_threads=st.integers(1, 4),
    num_batches=st.integers(1, 6),
    size_bytes=st.sampled_from((0, ALONE_BYTES)),
)
def test_batches_come_once_and_in_order_whatever_the_threads_do(
    num_rows, step, length, num_threads, num_batches, size_bytes
):
    rows = range(5, 5 + num_rows * step, step)
    planner = Stretches(length=length, size_bytes=size_bytes)
    ahead = opened(planner, rows, num_threads=num_threads, num_batches=num_batches)
    assert list(ahead) == [(row, row) for row in rows]
    ahead.close()
    assert planner.planned == list(rows)
    assert list(in_turn(Stretches(length=length), rows, lambda row, batch: (row, batch))) == [
        (row, row) for row in rows
    ]


def test_no_more_is_read_than_there_is_room_for_but_what_comes_next_is_planned():
    read: list[int] = []
    planner = Stretches(length=2, read=read.append)
    ahead = opened(planner, range(20), num_threads=1, num_batches=2)
    next(ahead)  # room for two: 1 and 2, which were planned together
    wait_until(lambda: planner.planned == [0, 1, 2, 3, 4])
    assert read == [0, 1, 2]
    next(ahead)
    next(ahead)
    wait_until(lambda: planner.planned == [0, 1, 2, 3, 4, 5, 6])
    assert read == [0, 1, 2, 3, 4]
    ahead.close()


@pytest.mark.parametrize("size_bytes", [0, ALONE_BYTES - 1])
def test_small_batches_are_read_by_one_thread_at_a_time(size_bytes):
    reading = threading.Lock()

    def read(row: int) -> int:
        assert reading.acquire(blocking=False), "two threads read at once"
        with_others.wait(0.001)
        reading.release()
        return row

    with_others = threading.Event()
    ahead = opened(Stretches(length=4, size_bytes=size_bytes, read=read), range(50), num_threads=4, num_batches=8)
    assert [row for row, _ in ahead] == list(range(50))
    ahead.close()


def test_large_batches_are_read_by_several_threads_together():
    two = threading.Barrier(2)

    def read(row: int) -> int:
        if row:  # the first is planned alone
            two.wait(30)
        return row

    ahead = opened(Stretches(length=2, size_bytes=ALONE_BYTES, read=read), range(9), num_batches=4)
    assert [row for row, _ in ahead] == list(range(9))
    ahead.close()


def test_an_error_comes_where_its_batch_would_and_those_before_it_come_first():
    def read(row: int) -> int:
        if row == 3:
            raise OSError("the disk is broken")
        return row

    ahead = opened(Stretches(read=read), range(9))
    assert [next(ahead) for _ in range(3)] == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(OSError, match="the disk is broken"):
        next(ahead)
    ahead.close()


def test_a_plan_that_fails_is_told_behind_what_was_planned_before():
    class Fails(Stretches):
        def plan(self, rows: Any) -> list[Planned]:
            if rows[0] == 3:  # behind 0, planned alone, and 1 and 2
                raise OSError("no such shard")
            return super().plan(rows)

    ahead = opened(Fails(), range(9))
    assert [next(ahead) for _ in range(3)] == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(OSError, match="no such shard"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()
