"""Groups of a user from the system's database, which may be slow, wrong or silent."""

from __future__ import annotations

import asyncio
import os
import pwd
import threading
from collections import Counter
from typing import TYPE_CHECKING

from cacheloader_daemon import memberships
from cacheloader_daemon.memberships import Memberships, groups_of

from cacheloader.fdpass import PeerCredentials
from tests.support.waiting import until

if TYPE_CHECKING:
    import pytest


PATIENT_S = 60.0
"""A deadline for answers that come: no test of them is about one."""


def peer(uid: int) -> PeerCredentials:
    return PeerCredentials(pid=1, uid=uid, gid=uid, groups=frozenset({uid}))


async def known(members: Memberships, uid: int) -> frozenset[int]:
    told = asyncio.Event()
    members.when_known(uid, told.set)
    async with asyncio.timeout(90):
        await told.wait()
    return members.completed(peer(uid)).groups


async def test_groups_of_process_and_database_count_together_and_are_asked_for_once() -> None:
    asked: Counter[int] = Counter()

    def look_up(uid: int) -> frozenset[int]:
        asked[uid] += 1
        return frozenset({7})

    members = Memberships(asyncio.get_running_loop(), look_up=look_up, deadline_s=PATIENT_S)
    assert await asyncio.gather(*(known(members, 5) for _ in range(4))) == [{5, 7}] * 4
    assert await known(members, 5) == {5, 7}
    assert asked == {5: 1}
    assert members.completed(peer(6)).groups == {6}


async def test_a_database_that_does_not_answer_holds_nobody_up_for_longer_than_its_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    silent = threading.Event()
    asked: Counter[int] = Counter()

    def look_up(uid: int) -> frozenset[int]:
        asked[uid] += 1
        if uid == 5:
            silent.wait(60)
        return frozenset({7})

    members = Memberships(asyncio.get_running_loop(), look_up=look_up, deadline_s=0.2)
    try:
        assert await known(members, 5) == {5}
        await until(lambda: asked[5] > 0)  # its thread may be late too
        assert "the groups of user 5 did not come from the system's database" in caplog.text
        assert await known(members, 5) == {5}, "and it is not asked again at once"
        assert asked == {5: 1}
    finally:
        silent.set()


async def test_a_database_that_cannot_be_asked_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def look_up(_uid: int) -> frozenset[int]:
        raise OSError("no route to the directory")

    members = Memberships(asyncio.get_running_loop(), look_up=look_up, deadline_s=PATIENT_S)
    assert await known(members, 5) == {5}
    assert "no route to the directory" in caplog.text


async def test_an_answer_is_asked_for_again_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memberships, "KEPT_S", 0.0)
    answers = [frozenset({7}), frozenset({8})]
    members = Memberships(asyncio.get_running_loop(), look_up=lambda _: answers.pop(0), deadline_s=PATIENT_S)
    assert await known(members, 5) == {5, 7}
    assert await known(members, 5) == {5, 8}, "who has left a group has lost its rights"


async def test_of_many_users_those_seen_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memberships, "MAX_USERS", 2)
    members = Memberships(asyncio.get_running_loop(), look_up=lambda _: frozenset({7}), deadline_s=PATIENT_S)
    for uid in (1, 2, 3):
        await known(members, uid)
    assert [members.completed(peer(uid)).groups for uid in (1, 2, 3)] == [{1}, {2, 7}, {3, 7}]


async def test_nobody_is_told_after_the_end() -> None:
    asked = threading.Event()
    release = threading.Event()

    def look_up(_uid: int) -> frozenset[int]:
        asked.set()
        release.wait(60)
        return frozenset()

    members = Memberships(asyncio.get_running_loop(), look_up=look_up, deadline_s=PATIENT_S)
    told: list[int] = []
    members.when_known(5, lambda: told.append(5))
    await until(asked.is_set)
    members.close()
    release.set()
    await until(lambda: not members._tasks)
    assert not told


def test_the_database_of_this_machine_is_read() -> None:
    user = pwd.getpwuid(os.getuid())
    assert user.pw_gid in groups_of(user.pw_uid)
    assert groups_of(2**31 - 5) == frozenset()
