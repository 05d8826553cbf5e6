import copy
import multiprocessing
import pickle
from typing import Any

import pytest

from cacheloader.cursor import SharedCursor, Start


def at(epoch: int, row: int = 0) -> Start:
    return Start(epoch=epoch, row=row)


def test_each_iteration_of_one_process_is_the_next_epoch() -> None:
    cursor = SharedCursor()
    assert [cursor.begin(iteration=-i) for i in range(1, 4)] == [at(0), at(1), at(2)]
    assert (cursor.current, cursor.next) == (at(2), at(3))


def test_workers_of_one_iteration_agree_and_the_next_iteration_is_the_next_epoch() -> None:
    cursor = SharedCursor()
    cursor.move_to(at(4, 7))
    for expected, seed in ((at(4, 7), 11), (at(5), 12)):
        assert [cursor.begin(worker=w, seed=seed, iteration=1) for w in (2, 0, 1)] == [expected] * 3


def test_persistent_workers_keep_their_seed_and_still_move_on() -> None:
    cursor = SharedCursor()
    for epoch in range(3):
        assert [cursor.begin(worker=w, seed=5, iteration=epoch + 1) for w in range(2)] == [at(epoch)] * 2


def test_a_user_who_seeds_torch_alike_before_each_epoch_still_moves_on() -> None:
    cursor = SharedCursor()
    for epoch in range(3):
        assert [cursor.begin(worker=w, seed=5, iteration=1) for w in range(2)] == [at(epoch)] * 2


def test_before_the_first_iteration_and_after_a_move_there_is_no_current_one() -> None:
    cursor = SharedCursor()
    assert cursor.current is None
    cursor.begin(iteration=-1)
    cursor.move_to(at(9))
    assert (cursor.current, cursor.next) == (None, at(9))


def begin_in_child(cursor: SharedCursor, worker: int, answers: Any) -> None:
    start = cursor.begin(worker=worker, seed=3, iteration=1)
    answers.put((start.epoch, start.row))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_every_start_method_share_the_owners_cursor(method: str) -> None:
    context = multiprocessing.get_context(method)
    cursor = SharedCursor()
    cursor.move_to(at(2, 5))
    answers = context.Queue()
    children = [context.Process(target=begin_in_child, args=(cursor, w, answers)) for w in range(3)]
    for child in children:
        child.start()
    assert [answers.get(timeout=100) for _ in children] == [(2, 5)] * 3
    for child in children:
        child.join(60)
    assert (cursor.current, cursor.next) == (at(2, 5), at(3))


def test_a_copy_in_the_same_process_goes_its_own_way_from_where_it_was_copied() -> None:
    cursor = SharedCursor()
    cursor.move_to(at(1, 3))
    twin = copy.deepcopy(cursor)
    assert twin.next == at(1, 3)
    twin.begin(iteration=-1)
    assert (twin.next, cursor.next) == (at(2), at(1, 3))


def test_a_stored_cursor_whose_owner_is_gone_starts_where_it_was_stored() -> None:
    cursor = SharedCursor()
    cursor.move_to(at(6, 1))
    stored = pickle.dumps(cursor)
    state = cursor.__getstate__() | {"pid": 2**22 + 1}
    revived = SharedCursor.__new__(SharedCursor)
    revived.__setstate__(state)
    assert revived.next == at(6, 1)
    assert len(stored) < 500
