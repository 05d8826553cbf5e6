from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cacheloader_daemon.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    store = Store.open(directory)
    yield store
    store.close()
