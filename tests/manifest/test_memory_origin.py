"""The store in memory keeps the contract of a real one, so that what is tested on it holds elsewhere."""

from __future__ import annotations

import pytest

from tests.contract import origin_stores
from tests.contract.test_origin_contract import *  # noqa: F403 - the contract's tests, with the store below
from tests.support.memory_origin import MemoryOrigin


class InMemory(origin_stores.Store):
    root = "mem://bucket/dir/"

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def put(self, key: str, body: bytes) -> None:
        self._objects[self.uri(key)] = body

    def origin(self) -> MemoryOrigin:
        origin = MemoryOrigin({})
        origin.objects = self._objects
        return origin

    def missing_store(self) -> tuple[MemoryOrigin, str]:
        return self.origin(), "mem://no-such-bucket/key"


@pytest.fixture
def store() -> InMemory:
    return InMemory()
