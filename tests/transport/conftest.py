from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cacheloader.config import TransportOptions
from cacheloader.transport import helper
from tests.transport.scripted_peer import ScriptedPeer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch, tmp_path):
    for name in ("CACHELOADER_DAEMON", "CACHELOADER_CACHE_DIR", "CACHELOADER_CACHE_SIZE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(helper, "IDLE_S", 0.5)  # what a test has started does not outlive it for long


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[ScriptedPeer]:
    with ScriptedPeer(tmp_path / "peer.sock") as running:
        yield running


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., TransportOptions]:
    def make(**values) -> TransportOptions:
        # A peer that is there is waited for, however busy the machine is: only one that is not makes these pass.
        patient = {"timeout_s": 60.0, "hello_timeout_s": 60.0, "fallback_after_s": 60.0}
        return TransportOptions(**({"daemon": f"unix://{tmp_path}/peer.sock"} | patient | values))

    return make
